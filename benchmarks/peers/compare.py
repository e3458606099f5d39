"""This project and its peers on one model, one trace and one machine, in one run: a table with ratios.

For:        trace tokens a second, time to first token, decode rates at batch 1, 4 and 16, prefill, peak memory.
Not for:    equal KV budgets (benchmarks/serving.py): every engine has its own default or generous room here.
May import: the standard library, benchmarks.

    sh benchmarks/peers/install.sh vllm     # and openvino, llamacpp, hf, model
    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.peers.compare .cache/models/smollm2-135m/config.yml \\
        --json out/peers.json

Every arm is a process of its own, in its own environment; all live through the run, and all but the one that is
measured are stopped (SIGSTOP). Rounds go through all arms, so that a change of the machine meets all; a figure is the
median of the rounds. Greedy, end tokens ignored, the same token ids. A peer that is not installed is a line that says
so. Leaves with status 1 if an arm that is installed fails or returns another number of tokens than asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import Failures, Figure, WrongPath
from benchmarks.traces import DEFAULT_TRACE, Asked, decode_rate, latencies, probe_prompts, read_trace

HERE = Path(__file__).parent
ROOT = Path(
    os.environ.get("PEERS_VENV")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maxtext-paged" / "peers"
)
INSTALL = "benchmarks/peers/install.sh"
BATCHES, DECODE_CONTEXT, DECODE_STEPS, PREFILL_TOKENS = (1, 4, 16), 256, 64, 512
PREFILLS = 4
"""Prompts one after the other: one alone is over in less than a second, and says little."""


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """How an arm is started.

    Attributes:
      venv: its environment under the root; None is this project's own. engine: its program.
      model: under the root; None is the configuration of the command line. arguments: of the program.
    """

    venv: str | None
    engine: str
    model: str | None
    arguments: tuple[str, ...] = ()


ARMS = {
    "paged": ArmSpec(None, "engine_ours.py", None, ("--arm", "paged", "--slots", "32")),
    "maxtext-dense": ArmSpec(None, "engine_ours.py", None, ("--arm", "dense", "--slots", "16")),
    "vllm-f32": ArmSpec("vllm", "engine_vllm.py", "weights/hf"),
    "vllm-bf16": ArmSpec("vllm", "engine_vllm.py", "weights/hf", ("--dtype", "bfloat16")),
    "openvino-f32": ArmSpec("openvino", "engine_openvino.py", "weights/model.F16.gguf"),
    "openvino": ArmSpec("openvino", "engine_openvino.py", "weights/model.F16.gguf", ("--precision", "default")),
    "llamacpp-f32": ArmSpec("llamacpp", "engine_llamacpp.py", "weights/model.F32.gguf", ("--slots", "16")),
    "hf": ArmSpec("hf", "engine_hf.py", "weights/hf", ("--slots", "16")),
}
DEFAULT_ARMS = ("paged", "vllm-f32", "openvino-f32", "llamacpp-f32", "hf", "maxtext-dense")


class NotInstalled(Exception):
    """An arm's environment or weights are not there."""


class Arm:
    """A running engine."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        spec = ARMS[name]
        python = Path(sys.executable) if spec.venv is None else options.root / spec.venv / "bin" / "python"
        model = Path(options.config) if spec.model is None else options.root / spec.model
        for needed in (python, model):
            if not needed.exists():
                what = spec.venv if needed == python else "model"
                raise NotInstalled(
                    f"{name} is not installed (no {needed.relative_to(options.root)}): sh {INSTALL} {what}"
                )
        words = [str(python), str(HERE / spec.engine), "--model", str(model), "--threads", str(options.threads)]
        words += [*spec.arguments, *(f"--set={word}" for word in options.overrides if spec.venv is None)]
        self.name = name
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # its children too are stopped, and ended, with it
        )
        ready = self._answer()
        if "missing" in ready:
            self.close()
            raise NotInstalled(f"{name} is not installed ({ready['missing']}): sh {INSTALL} {spec.venv}")
        self.version, self.start_seconds, self.peak_mib = ready["version"], ready["start_seconds"], 0.0
        self.pause()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WrongPath(f"{self.name} ended with status {self._process.wait()}; --verbose shows why")
        answer = dict(json.loads(line))
        if "error" in answer:
            raise WrongPath(f"{self.name}: {answer['error']}")
        return answer

    def pause(self) -> None:
        """Stop it: engines may spin while they wait."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run for a while."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.pause()

    def run(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> dict[str, Any]:
        """One list of requests; ``times``, ``tokens`` and ``seconds``.

        Raises:
          WrongPath: it failed, or returned another number of tokens than asked.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": list(prompts), "limits": list(limits)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WrongPath(f"{self.name} ended with status {self._process.wait()}; --verbose shows why") from None
        answer = self._answer()
        made = [len(tokens) for tokens in answer["tokens"]]
        if made != list(limits) or [len(times) for times in answer["times"]] != made:
            raise WrongPath(f"{self.name} made {made} tokens of {list(limits)}")
        self.peak_mib = max(self.peak_mib, answer["peak_rss_mib"])
        return answer

    def close(self) -> None:
        """End it and its children."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def measure(arm: Arm, tests: Sequence[str], trace: Sequence[Asked]) -> dict[str, float]:
    """Every test once."""
    found: dict[str, float] = {}
    if "trace" in tests:
        answer = arm.run([asked.prompt for asked in trace], [asked.max_tokens for asked in trace])
        times = latencies(answer["times"])
        found["trace_tokens_per_second"] = times.num_tokens / answer["seconds"]
        found["trace_ttft_p50"], found["trace_ttft_p99"] = times.ttft_p50, times.ttft_p99
        found["trace_itl_p50"], found["trace_itl_p99"] = times.itl_p50, times.itl_p99
    if "decode" in tests:
        for batch in BATCHES:
            prompts = probe_prompts(trace, batch, DECODE_CONTEXT)
            answer = arm.run(prompts, [1 + DECODE_STEPS] * batch)
            found[f"decode_b{batch}_tokens_per_second"] = decode_rate(answer["times"])
    if "prefill" in tests:
        seconds = [arm.run([prompt], [1])["seconds"] for prompt in probe_prompts(trace, PREFILLS, PREFILL_TOKENS)]
        found["prefill_tokens_per_second"] = PREFILLS * PREFILL_TOKENS / sum(seconds)
    return found


def warm(arm: Arm, tests: Sequence[str], trace: Sequence[Asked]) -> None:
    """What is not measured: engines compile, allocate and touch memory at their first requests."""
    arm.run([asked.prompt for asked in trace], [min(4, asked.max_tokens) for asked in trace])
    if "decode" in tests:
        for batch in BATCHES:
            arm.run(probe_prompts(trace, batch, DECODE_CONTEXT), [4] * batch)


def ratios(test: str, mine: Figure, other: Figure, agreement: float) -> Figure:
    """How many times as fast ``mine`` is, round by round: what slows the whole machine down slows both."""
    pairs = list(zip(mine.passes, other.passes, strict=True))
    faster = [a / b if test.endswith("per_second") else b / a for a, b in pairs]
    return records.figure(faster, agreement=agreement)


def show(
    figures: dict[str, dict[str, Figure]], beside: dict[str, dict[str, Figure]], arms: dict[str, Arm], baseline: str
) -> None:
    """Two lines an arm: its figures, and how many times as fast ``baseline`` is, the median of the rounds."""
    names = [
        name for name in next(iter(figures.values()), {}) if not name.startswith("trace_itl") and "p99" not in name
    ]
    print(f"{'arm':15}" + "".join(f"{name.removesuffix('_per_second'):>28}" for name in names) + f"{'peak MiB':>10}")
    for arm, own in figures.items():
        line = f"{arm:15}"
        for name in names:
            one = own[name]
            line += f"{one.median:18.2f}{' ' if one.reportable else '?'} ({one.spread:.2f}) "
        print(f"{line}{arms[arm].peak_mib:10.0f}  {arms[arm].version}")
        if arm in beside:
            line = f"{'':15}"
            for name in names:
                one = beside[arm][name]
                line += f"{f'x{one.median:.2f}':>18}{' ' if one.reportable else '?'} ({one.spread:.2f}) "
            print(line)
    print(f"xN: {baseline} is N times as fast, median of ratios round by round; (largest over smallest round);")
    print("? the rounds do not agree")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all arms and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of this project's arms")
    parser.add_argument("--arms", default=",".join(DEFAULT_ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--tests", default="trace,decode,prefill")
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--root", type=Path, default=ROOT, help="of the environments and weights (PEERS_VENV)")
    parser.add_argument("--agreement", type=float, default=records.AGREEMENT, help="largest over smallest round")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--verbose", action="store_true", help="show what the engines write")
    parser.add_argument("--json", type=Path, help="write the record here")
    options, failures = parser.parse_args(arguments), Failures("benchmarks.peers.compare")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines end with this program
    trace, tests = read_trace(options.trace, options.requests), options.tests.split(",")
    arms: dict[str, Arm] = {}
    values: dict[str, dict[str, list[float]]] = {}
    foreign: list[dict[str, Any]] = []
    started = time.perf_counter()
    try:
        for name in options.arms.split(","):
            if name not in ARMS:
                parser.error(f"no such arm: {name}")
            try:
                arms[name] = Arm(name, options)
                with arms[name].awake():
                    warm(arms[name], tests, trace)
                print(f"{name}: {arms[name].version}, started in {arms[name].start_seconds:.1f} s", flush=True)
            except NotInstalled as error:
                print(error, flush=True)
            except WrongPath as error:
                failures.add(str(error))
                if name in arms:
                    arms.pop(name).close()
        for number in range(options.rounds):
            for name, arm in list(arms.items()):
                try:
                    with arm.awake(), records.one_pass(quiet=not options.no_wait) as watch:
                        found = measure(arm, tests, trace)
                except WrongPath as error:
                    failures.add(str(error))
                    arms.pop(name).close()
                    values.pop(name, None)
                    continue
                # `foreign` counts the arm itself: it is another process
                foreign.append({"arm": name, "round": number, "seconds": watch.seconds, "cores_used": watch.foreign})
                for test, value in found.items():
                    values.setdefault(name, {}).setdefault(test, []).append(value)
                print(f"round {number} {name}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()), flush=True)
        figures = {
            arm: {test: records.figure(rounds, agreement=options.agreement) for test, rounds in tests_of.items()}
            for arm, tests_of in values.items()
        }
        beside = {
            arm: {test: ratios(test, figures["paged"][test], one, options.agreement) for test, one in own.items()}
            for arm, own in figures.items()
            if arm != "paged" and "paged" in figures
        }
        if figures:
            show(figures, beside, arms, "paged")
        records.write(
            options.json,
            {
                "seconds": time.perf_counter() - started,
                "trace": str(options.trace.name),
                "requests": len(trace),
                "threads": options.threads,
                "arms": {
                    name: {
                        "version": arm.version,
                        "start_seconds": arm.start_seconds,
                        "peak_rss_mib": arm.peak_mib,
                        "arguments": ARMS[name].arguments,
                        "figures": figures.get(name, {}),
                        "paged_times_as_fast": beside.get(name, {}),
                    }
                    for name, arm in arms.items()
                },
                "rounds": foreign,
                "environment": records.environment(),
            },
        )
    finally:
        for arm in arms.values():
            arm.close()
    return failures.status()


if __name__ == "__main__":
    sys.exit(main())
