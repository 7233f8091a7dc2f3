"""Widgets and comms of cells that run on workers."""

from __future__ import annotations

from tests.notebook.cells import done, run, setup

MAKE = """
import ipywidgets
slider, image = ipywidgets.IntSlider(max=5), ipywidgets.Image(value=b"\\x00\\xff")
box = ipywidgets.VBox([slider, image])
"""


def test_widgets_change_in_place_and_their_observers_run_in_the_notebook(kernel):
    setup(kernel, MAKE + "seen = []\nslider.observe(lambda change: seen.append(change['new']), 'value')\nsame = slider")
    for _ in range(2):
        output = done(
            kernel, "slider.value += 2\nimage.value = bytes(image.value) + b'\\x01'\nbox.children = box.children[::-1]"
        )
        assert not any("new object" in text for text in output.texts)
    assert kernel.value("(slider.value, bytes(image.value), seen, same is slider)") == (
        4,
        b"\x00\xff\x01\x01",
        [2, 4],
        True,
    )
    assert kernel.value("[child is expected for child, expected in zip(box.children, (slider, image))]") == [True] * 2


def test_a_widget_that_a_cell_makes_belongs_to_the_notebook_afterwards(kernel):
    done(kernel, "import ipywidgets\nlabels = [ipywidgets.Label(str(i)) for i in range(2)]\nlabels[1].value += '!'")
    setup(kernel, "labels[0].value = 'from the notebook'")
    assert done(kernel, "print([label.value for label in labels])").stdout == "['from the notebook', '1!']\n"
    done(kernel, "labels[0].close()")
    assert kernel.value("(labels[0].comm, labels[1].comm is None)") == (None, False)


def test_a_widget_whose_class_needs_arguments_is_shown_without_a_counterpart(kernel):
    setup(kernel, MAKE + "other = ipywidgets.IntSlider()\nbefore = set(get_ipython().kernel.comm_manager.comms)")
    output = done(
        kernel, "link = ipywidgets.jslink((slider, 'value'), (other, 'value'))\nprint(link.model_id)\ndel link"
    )
    assert output.stderr == ""
    opened = "set(get_ipython().kernel.comm_manager.comms) - before"
    assert kernel.value(f"{output.stdout.strip()!r} in {opened}") is True


def test_an_observer_that_raises_does_not_end_the_cell(kernel):
    setup(kernel, MAKE + "slider.observe(lambda change: 1 / 0, 'value')")
    output = done(kernel, "slider.value += 1\nprint('on')")
    assert output.stdout == "on\n"
    assert "a change of a widget raised ZeroDivisionError: division by zero" in output.stderr
    assert kernel.value("slider.value") == 1


def test_a_comm_of_another_target_is_opened_and_closed_by_the_kernel(kernel):
    known = "name in get_ipython().kernel.comm_manager.comms"
    done(
        kernel,
        "import comm, ipywidgets\nopened = comm.create_comm(target_name='mine')\nname = opened.comm_id\ndel opened",
    )
    assert kernel.value(known) is True
    done(kernel, "closed = comm.create_comm(target_name='mine')\nname = closed.comm_id\nclosed.close()\ndel closed")
    assert kernel.value(known) is False


def test_a_widget_of_a_class_of_the_notebook_and_a_closed_one_are_refused(kernel):
    setup(kernel, MAKE + "class Own(ipywidgets.Label):\n    pass\nown = Own('x')\nimage.close()")
    for name, what in (("own", "of a class defined in the notebook"), ("image", "closed")):
        output = run(kernel, f"\n{name}.value")
        assert output.error is not None
        assert output.error[0] == "ShippingError"
        assert what in output.error[1]
