import json
import logging
import sys

import pytest
from traitlets.config import Application

from accel_nb.notebook.output.log_records import RECORD, handle_record
from accel_nb.notebook.session.log_handlers import read_handlers, seek_ends, send_records, set_handlers
from accel_nb.notebook.session.process_settings import read_settings


@pytest.fixture
def logger():
    logger = logging.getLogger("handlers of a test")
    logger.setLevel(logging.INFO)
    yield logger
    set_handlers([])
    for handler in list(logger.handlers):
        handler.close()
        logger.removeHandler(handler)


def own(logger):
    return [item for item in read_handlers() if item["logger"] == logger.name]


def test_a_file_is_appended_to_by_the_copy_and_then_by_the_original(logger, tmp_path):
    original = logging.FileHandler(tmp_path / "a.log", mode="w")
    original.setFormatter(logging.Formatter("{message}!", style="{"))
    logger.addHandler(original)
    logger.info("one")
    handlers = own(logger)
    logger.removeHandler(original)
    set_handlers(handlers)
    logger.info("two")
    set_handlers([])
    logger.addHandler(original)
    seek_ends()
    logger.info("three")
    assert (tmp_path / "a.log").read_text() == "one!\ntwo!\nthree!\n"


def test_other_ranks_write_to_no_file(logger, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    logger.addHandler(original := logging.FileHandler(tmp_path / "a.log", delay=True))
    handlers = own(logger)
    logger.removeHandler(original)
    set_handlers(handlers)
    logger.info("one")
    assert not (tmp_path / "a.log").exists()


def test_the_output_of_the_cell_is_written_once(logger, capsys):
    logger.addHandler(original := logging.StreamHandler(sys.stdout))
    logger.propagate = False
    handlers = own(logger)
    set_handlers(handlers)  # the process has the original too
    logger.info("one")
    logger.removeHandler(original)
    set_handlers(handlers)
    logger.info("two")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_handlers_of_libraries_are_left_to_these(logger):
    library = logging.getLogger("pytest.of_a_test")
    library.addHandler(handler := logging.StreamHandler(sys.stderr))
    for formatter in (None, Shouting()):
        handler.setFormatter(formatter)
        assert not own(library)
    library.removeHandler(handler)


def test_the_level_of_the_kernels_application_is_not_copied(logger):
    assert not Application.initialized()
    application = Application.instance()
    try:
        application.log.setLevel(logging.ERROR)
        levels = read_settings({})["log_levels"]
        assert application.log.name not in levels
        assert levels[logger.name] == logging.INFO
    finally:
        application.log.setLevel(logging.NOTSET)
        Application.clear_instance()


class Listing(logging.Handler):
    def __init__(self, level=logging.NOTSET):
        super().__init__(level)
        self.records = []

    def emit(self, record):
        self.records.append(record)


def test_records_reach_the_original_of_another_class(logger):
    every, errors = Listing(), Listing(logging.ERROR)
    logger.addHandler(every)
    logger.addHandler(errors)
    handlers = own(logger)
    logger.handlers.clear()
    set_handlers(handlers)
    sent = []
    send_records(lambda topic, body: sent.append((topic, json.loads(json.dumps(body)))))
    logger.info("step %d", 3, extra={"loss": 0.5})
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed")
    set_handlers([])
    logger.addHandler(every)
    logger.addHandler(errors)
    for topic, body in sent:
        assert topic == RECORD
        handle_record(body)
    first, second = every.records
    assert (first.getMessage(), first.loss, first.funcName) == (
        "step 3",
        0.5,
        "test_records_reach_the_original_of_another_class",
    )
    assert logging.Formatter().format(second).splitlines()[-1] == "ValueError: wrong"
    assert [record.getMessage() for record in errors.records] == ["failed"]


class Shouting(logging.Formatter):
    def format(self, record):
        return record.getMessage().upper()


def test_formatters_and_filters_of_the_notebook_have_effect(logger, capsys, tmp_path):
    loud, some = logging.StreamHandler(sys.stdout), logging.FileHandler(tmp_path / "a.log")
    loud.setFormatter(Shouting("%(of_a_subclass)s"))
    some.addFilter(lambda record: "secret" not in record.getMessage())
    logger.handlers[:] = [loud, some]
    logger.propagate = False
    handlers = own(logger)
    logger.handlers.clear()
    set_handlers(handlers)
    sent = []
    send_records(lambda topic, body: sent.append(body))
    logger.info("one")
    logger.info("secret")
    assert capsys.readouterr() == ("", "")
    set_handlers([])
    logger.handlers[:] = [loud, some]
    for body in sent:
        handle_record(body)
    assert capsys.readouterr() == ("ONE\nSECRET\n", "")
    assert (tmp_path / "a.log").read_text() == "one\n"


def test_defaults_of_formatters_are_the_notebooks(logger):
    logger.addHandler(handler := logging.StreamHandler(sys.stdout))
    targets = []
    for formatter in (logging.Formatter("{message}", style="{"), logging.Formatter("%(run)s", defaults={"run": 3})):
        handler.setFormatter(formatter)
        targets.append(own(logger)[-1]["target"])  # before it are those of pytest
    assert targets == ["<stdout>", "<logging.StreamHandler>"]


def test_what_a_library_of_the_workers_handles_itself_is_not_sent(logger):
    logger.addHandler(Listing())
    set_handlers(own(logger))  # the process has the original too, as if a library had added it there
    sent = []
    send_records(lambda topic, body: sent.append(body))
    logger.info("one")
    assert not sent
