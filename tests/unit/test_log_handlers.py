import logging
import sys

import pytest
from traitlets.config import Application

from accel_nb.notebook.session.log_handlers import read_handlers, seek_ends, set_handlers
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
