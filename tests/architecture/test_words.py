"""The check of words finds what it should, and nothing else."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "words.py"


@pytest.fixture(scope="module")
def words():
    spec = importlib.util.spec_from_file_location("words", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["words"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["words"]


def python_lines(words, text: str) -> list[int]:
    return [finding.line for finding in words.check_python(text)]


@pytest.mark.parametrize("first", ["Hear", "Hears", "Let", "Lets", "Take", "Takes", "Give", "Knows", "Tells", "Wants"])
def test_the_first_word_of_a_docstring(words, first):
    assert python_lines(words, f'"""{first} a record."""\n')[0] == 1
    assert python_lines(words, f'class A:\n    """{first} a record."""\n')[0] == 1
    assert python_lines(words, f'\nclass A:\n    def f(self):\n        """{first} a record."""\n')[0] == 3


@pytest.mark.parametrize("text", ["Sends records.", "Marks the reads of a rank.", "Cuts a batch into rows."])
def test_a_module_does_not_begin_with_an_action(words, text):
    assert python_lines(words, f'"""{text}"""\n') == [1]
    assert python_lines(words, f'class A:\n    """{text}"""\n') == []


@pytest.mark.parametrize("text", ["Marks of a pipe.", "Files, each with a name.", "Results of a run."])
def test_a_module_may_begin_with_a_plural(words, text):
    assert python_lines(words, f'"""{text}"""\n') == []


@pytest.mark.parametrize("text", ["Return a record.", "Letters of a name.", "Taken: a record.", "Return it."])
def test_other_docstrings(words, text):
    assert python_lines(words, f'def f():\n    """{text}"""\n') == []


@pytest.mark.parametrize("text", ["How it ends.", "What a rank has.", "Where they are.", "Return what a rank has."])
def test_docstrings_whose_subject_is_unclear(words, text):
    assert python_lines(words, f'class A:\n    """{text}"""\n') == [1]
    assert python_lines(words, f'\ndef f():\n    """{text}"""\n') == [2]


def test_a_function_returns_whether_and_a_property_is_whether(words):
    assert python_lines(words, 'def f():\n    """Whether it ends."""\n') == [1]
    assert python_lines(words, '@property\ndef f(self):\n    """Whether it ends."""\n') == []
    assert python_lines(words, '@functools.cached_property\ndef f(self):\n    """Whether it ends."""\n') == []


def test_a_module_is_a_noun_phrase(words):
    assert python_lines(words, '"""Divides a batch."""\n') == [1]
    assert python_lines(words, 'class A:\n    """Divides a batch."""\n') == []
    assert python_lines(words, '"""Reports of a batch."""\n') == []


@pytest.mark.parametrize("person", ["whoever", "nobody", "Somebody"])
def test_persons_in_docstrings_comments_and_messages(words, person):
    assert python_lines(words, f'"""A module.\n\nThat {person} reads.\n"""\n') == [3]
    assert python_lines(words, f"x = 1\ny = 2  # {person} reads it\n") == [2]
    assert python_lines(words, f"raise ValueError('{person} is there')\n") == [1]
    assert python_lines(words, f"raise ValueError(f'{person} is {{x}} there')\n") == [1]


@pytest.mark.parametrize("text", ["a data set", "Texts of a file", "it was asked for", "the pool knows", "it goes on"])
def test_words_with_a_standard_term(words, text):
    assert python_lines(words, f'"""A module.\n\n{text}.\n"""\n') == [3]
    assert python_lines(words, f"x = 1  # {text}\n") == [1]
    assert python_lines(words, f"raise ValueError('{text}')\n") == [1]


@pytest.mark.parametrize("text", ["a dataset", "text of a file", "a known name", "it continues"])
def test_standard_terms(words, text):
    assert python_lines(words, f"x = 1  # {text}\n") == []


def test_values_and_names_are_no_text(words):
    assert python_lines(words, "user = 'nobody'\nnobody = 1\n") == []


@pytest.mark.parametrize("name", ["hear", "hear_beside", "tell", "tell_ranks", "let_go", "_give_back", "take_up_all"])
def test_function_names(words, name):
    assert python_lines(words, f"def {name}():\n    pass\n") == [1]
    assert python_lines(words, f"class A:\n    async def {name}(self):\n        pass\n") == [2]


@pytest.mark.parametrize("name", ["heartbeat", "teller", "take", "give", "let_gone", "read_back"])
def test_other_function_names(words, name):
    assert python_lines(words, f"def {name}():\n    pass\n") == []


def test_typescript(words):
    text = "const a = 1; // nobody reads it\nconst b = 'somebody';\nconst c = 2;\n"
    assert [finding.line for finding in words.check_typescript(text)] == [1, 2]


def test_findings_are_printed_with_their_place(words, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "accel_nb").mkdir()
    (tmp_path / "accel_nb" / "a.py").write_text("def tell():\n    pass\n")
    assert words.main([]) == 1
    assert capsys.readouterr().out == "accel_nb/a.py:1: function name 'tell': use a term of the field\n"
    (tmp_path / "accel_nb" / "a.py").write_text("def send():\n    pass\n")
    assert words.main([]) == 0
