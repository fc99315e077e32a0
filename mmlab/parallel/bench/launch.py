"""Real processes for one measurement: torch's own launcher, and what each of them does."""

from __future__ import annotations

import logging
import signal
import uuid
from contextlib import suppress
from typing import Any

import torch
from tqdm.auto import tqdm

from mmlab.errors import RunError
from mmlab.machine import share_cores
from mmlab.parallel.bench.arms import take_turn
from mmlab.parallel.bench.group import Groups
from mmlab.parallel.bench.probes import probe_network, probe_work
from mmlab.parallel.bench.setting import Setting

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # that the launcher takes over


def measure(setting: Setting) -> list[dict[str, Any]]:
    """Start the ranks, measure, and return what each found, rank 0 first.

    Raises:
        RunError: a rank failed; the message has its error.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    share_cores()  # ranks inherit it: threads that spin while they wait would count as busy
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=setting.num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    logger.setLevel(
        logging.CRITICAL
    )  # a rank's traceback is in the error's cause; the message is in the error
    try:
        found = elastic_launch(config, rank_main)(setting)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise RunError(_message(failure)) from error
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stopped.sigval) from None
    finally:
        logger.setLevel(level)
        with suppress(ValueError):  # only the main thread may, and only there were they changed
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return [found[rank] for rank in sorted(found)]


def rank_main(setting: Setting) -> dict[str, Any]:
    """What one rank does.

    Raises:
        RunError: a rank failed, the first one is named; the launcher then ends the others.
    """
    groups = Groups(setting.backend)
    try:
        return _probes_and_turns(setting, groups)
    except Exception as error:
        raise RunError(groups.tell(error)) from error


def _probes_and_turns(setting: Setting, groups: Groups) -> dict[str, Any]:
    """Probes, then the strategies in turns, another one first in each round."""
    rank = groups.rank
    torch.set_num_threads(setting.threads_per_rank)
    if setting.device_type == "cuda":
        torch.cuda.set_device(setting.device(rank))
    names = list(setting.strategies)
    show = setting.progress and rank == 0
    with tqdm(
        total=2 + setting.num_rounds * len(names), desc="probing", disable=None if show else True
    ) as bar:

        def done(following: str) -> None:
            bar.update()
            bar.set_description(following)

        found: dict[str, Any] = {"work": probe_work(setting, groups)}
        done("probing links")
        found["network"] = probe_network(setting, groups) if setting.num_ranks > 1 else []
        turns = [
            (number, name)
            for number in range(setting.num_rounds)
            for name in names[number % len(names) :] + names[: number % len(names)]
        ]
        arms: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for (number, name), (_, following) in zip(turns, [*turns[1:], (0, "done")], strict=True):
            if number == 0 and name == turns[0][1]:
                bar.set_description(name)
            turn = take_turn(setting, name, groups, measure=number == 0)
            if turn is not None:
                arms[name].append(turn)
            done(following)
    return found | {"arms": arms}


def _message(failure: Any) -> str:
    """The last line of what a rank said."""
    said = failure.message
    text = said.get("message", "") if isinstance(said, dict) else str(said)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rpartition("RunError: ")[2] if lines else f"exit code {failure.exitcode}"
