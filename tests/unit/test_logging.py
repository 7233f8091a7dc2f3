import logging

import pytest

from accel_nb import get_logger
from accel_nb.accelerator.process.progress import tqdm
from accel_nb.compat.logging import MultiProcessAdapter
from accel_nb.errors import MisuseError


@pytest.fixture
def as_rank_1(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_one_process_logs_from_the_callers_line(caplog):
    logger = get_logger("tests.ranked", "info")
    logger.info("hello %s", "you")
    logger.debug("not this")
    logger.info("all", main_process_only=False)
    logger.info("in order", in_order=True)

    assert [record.getMessage() for record in caplog.records] == ["hello you", "all", "in order"]
    assert {record.filename for record in caplog.records} == {"test_logging.py"}
    assert logging.getLogger("tests.ranked").level == logging.INFO


def test_the_root_logger_is_left_alone():
    before = logging.getLogger().level
    get_logger("tests.level", logging.ERROR)
    assert logging.getLogger().level == before


@pytest.mark.usefixtures("as_rank_1")
def test_other_ranks_are_silent_unless_asked(caplog):
    logger = get_logger("tests.silent", "INFO")
    logger.info("not here")
    logger.info("here", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["[rank 1] here"]


def test_the_same_is_warned_of_once(caplog):
    logger = get_logger("tests.once")
    for number in (1, 1, 2):
        logger.warning_once("number %d", number)
    logger.warning_once("list %s", [1])
    assert [record.getMessage() for record in caplog.records] == ["number 1", "number 2", "list [1]"]
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


def test_the_adapter_of_accelerate_logs_its_extra_from_the_callers_line(caplog):
    logger = MultiProcessAdapter(logging.getLogger("tests.adapter"), {"run": "a", "step": 0})
    logger.warning("one", extra={"step": 1})
    logger.log(logging.WARNING, "two")
    logger.warning_once("three")
    logger.warning_once("three")
    assert [(record.run, record.step, record.getMessage()) for record in caplog.records] == [  # type: ignore[attr-defined]
        ("a", 1, "one"),
        ("a", 0, "two"),
        ("a", 0, "three"),
    ]
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


@pytest.mark.parametrize("level", ["loud", 1.5])
def test_an_unknown_level_is_refused(level):
    with pytest.raises(MisuseError, match="debug, info, warning"):
        get_logger("tests.wrong", level)


def test_a_bar_is_drawn_by_the_first_rank_only(monkeypatch, capsys):
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # else it starts a thread
    assert list(tqdm([1, 2])) == [1, 2]
    assert "2/2" in capsys.readouterr().err
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert list(tqdm([1, 2])) == [1, 2]
    assert capsys.readouterr().err == ""
    assert list(tqdm([1, 2], main_process_only=False)) == [1, 2]
    assert "2/2" in capsys.readouterr().err
