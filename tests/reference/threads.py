"""Threads of the reference."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def single_threaded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run it on one thread: on a busy machine waiting for a second one costs more than the sums."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **options)
        finally:
            torch.set_num_threads(threads)

    return run
