"""``PagedMaxEngine``: MaxText's ``MaxEngine`` with paged entry points beside the dense ones.

For:        callers who prefill, generate and release themselves, with or without a policy of their own.
Not for:    batches of rows (offline_engine.py). There is no second paged loop here: every step is the session's.
May import: numpy, kv_common, kv_control, kv_execution, maxtext, maxtext_paged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from maxtext.inference.maxengine.maxengine import MaxEngine

from kv_common.errors import ConfigError, PageStateError, RequestError, StaleHandleError, UnsupportedError
from kv_control.logit_options import NO_LOGIT_OPTIONS, LogitOptions
from kv_control.plan import RequestHandle, RequestId, RequestSlice, SamplingSpec
from kv_control.request import Request, RequestStatus
from kv_execution.step_outcome import StepOutcome
from maxtext_paged.assembly import PagedAssembly, assemble, paging_config
from maxtext_paged.loading import load_params, params_from_tree
from maxtext_paged.rows import Row, row_seed
from maxtext_paged.sampling_defaults import default_sampling
from maxtext_paged.session import PagedSession, start_session
from maxtext_paged.token_stream import PagedToken, TokenStream
from maxtext_paged.tokenizer import as_token_ids, load_tokenizer
from maxtext_paged.worker import PagedInferenceWorker


def _dense(name: str, instead: str) -> Callable[..., Any]:
    """MaxEngine's method ``name``, refused under ``gpu_paged``: it would allocate or expect a dense cache."""
    theirs = getattr(MaxEngine, name)

    @functools.wraps(theirs)
    def method(self: PagedMaxEngine, *args: Any, **kwargs: Any) -> Any:
        if self.paged:
            raise UnsupportedError(f"{name} belongs to MaxText's dense cache; with attention=gpu_paged {instead}")
        return theirs(self, *args, **kwargs)

    return method


class PagedMaxEngine(MaxEngine):
    """``MaxEngine`` under ``attention=gpu_paged``; with any other configuration it is just that.

    ::

        engine = PagedMaxEngine(config)
        engine.init_paged_runtime(engine.load_params())
        request, token, logprob = engine.prefill_paged(prompt, max_tokens=64)
        while not request.finished:
            for piece in engine.generate_paged():
                ...                                   # piece.request, piece.token, piece.logprob
        engine.release(request)

    "No room now" is a return value: ``prefill_paged``, ``open_request`` and ``paged_step`` return None, and
    nothing is lost. Requests of ``prefill_paged`` are run, preempted and ended by the session's driver; handles of
    ``open_request`` belong to the caller, who drives them with ``paged_step``. Both share pool and rows.

    Attributes:
      paged: whether the configuration says ``gpu_paged``.
      session: the loop, after ``init_paged_runtime``. worker: completes whole rows through the same loop.
    """

    def __init__(self, config: Any, devices: Any = None) -> None:
        """As ``MaxEngine``; under ``gpu_paged`` the layers are unscanned, whatever the configuration says."""
        self.paged = config.attention == "gpu_paged"
        super().__init__(paging_config(config) if self.paged else config, devices)
        self.session: PagedSession | None = None
        self.worker: PagedInferenceWorker | None = None
        self._streams: dict[RequestId, TokenStream] = {}
        self._handles: dict[int, RequestHandle] = {}
        self._num_prefills = 0

    # --- weights and start -----------------------------------------------------------------------------

    @functools.cached_property
    def _assembly(self) -> PagedAssembly:
        if not self.paged:
            raise ConfigError(f"attention={self.config.attention}: paged entry points need attention=gpu_paged")
        return assemble(self.config, mesh=self.mesh)

    def load_params(self, *args: Any, params: Any = None, rng: Any = None, **kwargs: Any) -> Any:
        """Weights straight into their sharding, unscanned and in compute dtype; nothing dense is built.

        Args:
          params: a trainer's (``nnx.State`` or mapping, scanned or not); None loads ``load_parameters_path``, or
            random ones from ``init_weights_seed`` where that is empty.
          rng: MaxText's argument, which decides nothing here.
        """
        if not self.paged:
            return super().load_params(*args, params=params, rng=rng, **kwargs)
        if args or kwargs:
            raise UnsupportedError(f"load_params takes params and rng, not {[*args, *kwargs]}")
        model = self._assembly.model
        self.abstract_params = model.abstract_params
        return load_params(model) if params is None else params_from_tree(model, params)

    def init_paged_runtime(self, params: Any, *, rng: Any = None) -> PagedSession:
        """Allocate the pool and start the loop; a former one, with all that ran in it, is dropped first.

        Args:
          params: from ``load_params``, or a trainer's.
          rng: run key of sampling; None is key 0.
        """
        assembly = self._assembly
        if self.session is not None:
            self.session.close()
            self._streams, self._handles = {}, {}
        self.session = start_session(assembly, params=params, rng=rng)
        self.worker = PagedInferenceWorker(self.session)
        return self.session

    def update_params(self, params: Any) -> None:
        """Exchange the weights from the next step on, scanned or not. Nothing compiles."""
        self._started().update_params(params)

    def reset_prefix_cache(self) -> int:
        """Forget every cached page; returns how many there were."""
        return self._started().reset_prefix_cache()

    # --- requests that the driver runs --------------------------------------------------------------------

    def prefill_paged(
        self,
        tokens: Any,
        *,
        max_tokens: int | None = None,
        sampling: SamplingSpec | None = None,
        stop_token_ids: Iterable[int] = (),
        return_prompt_logp: bool = False,
        min_tokens: int = 0,
        options: LogitOptions = NO_LOGIT_OPTIONS,
    ) -> tuple[Request, int, float] | None:
        """Run a prompt and sample its first token.

        Requests that are generating share the steps this takes, so decodes never wait for a long prompt; what
        they get meanwhile is handed out by the next calls of ``generate_paged``.

        Args:
          tokens: the prompt: a list or array ``[n]`` or ``[1, n]`` of ids, without padding.
          max_tokens: most tokens to generate, the first included; None is as many as fit.
          sampling: None follows ``decode_sampling_*``, with a seed of this prompt's own.
          stop_token_ids: tokens that end it; none are known otherwise.
          return_prompt_logp: fill ``request.prompt_logprobs``.
          min_tokens: no stop token is chosen before so many.
          options: penalties, bias, and alternatives, which are in ``request.alternatives``.

        Returns:
          ``(request, token, logprob)``. The request is the handle for ``release``; None when rows or pages are
          taken: generate, release something, and try again.

        Raises:
          RequestError: the prompt can never run (RequestTooLarge), or failed on its way.
        """
        session, worker = self._started(), self._worker()
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens={max_tokens}: a prefill samples a token, so at least 1")
        if sampling is None:
            sampling = replace(default_sampling(self.config), seed=row_seed(None, self._num_prefills))
        prompt = np.asarray(as_token_ids(tokens), np.int64)
        row = Row(
            index=self._num_prefills,
            tokens=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=frozenset(stop_token_ids),
            want_prompt_logprobs=return_prompt_logp,
            min_tokens=min_tokens,
            options=options,
        )
        request = worker.new_request(row)
        scheduler = session.driver.scheduler
        full = scheduler.num_waiting or not session.control.num_free_rows
        session.driver.submit(request)
        if request.max_tokens < 1:
            session.driver.cancel(request.id)
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and fills the context of "
                f"{session.control.limits.max_model_len}: raise `max_target_length` or shorten the prompt"
            )
        while not full and not request.num_generated and not request.finished:
            worker.step()
            worker.settle()  # its token, and not a step more of the others
            full = request.status is RequestStatus.WAITING  # not let in, or sent back for older ones
        if full:
            session.driver.cancel(request.id)
            return None
        if request.finish_reason == "error":
            raise RequestError(request.error or "the prompt failed")
        self._num_prefills += 1
        stream = self._streams[request.id] = TokenStream(request)
        first = stream.next()
        assert first is not None and first.token is not None
        return request, first.token, first.logprob

    def generate_paged(self) -> list[PagedToken]:
        """The next token of every request that has one: one decode step for all that run.

        A request appears at most once, and its tokens come in order. One that was sent back for want of pages
        appears again when it has been recomputed. Ended requests have given their pages back.

        Returns:
          In order of prefill; empty only when nothing is left to generate.
        """
        worker, scheduler = self._worker(), self._started().driver.scheduler
        if any(stream.starved for stream in self._streams.values()):
            if self._started().driver.fills_pipe:
                worker.step()
            worker.step()
        while True:
            pieces = [piece for stream in self._streams.values() if (piece := stream.next()) is not None]
            if pieces or all(stream.ended for stream in self._streams.values()) or not scheduler.has_work:
                return pieces
            worker.step()

    def cancel(self, request: Request) -> None:
        """End a request of ``prefill_paged``, from any thread: when the next step begins, whatever its state is then.

        ``generate_paged`` hands out what it got until then, the last with ``finish_reason`` "cancelled" (unless it had
        ended already). It is still to be released.
        """
        self._started().driver.cancel_soon(request.id)

    def release(self, handle: Request | RequestHandle) -> None:
        """End a request, whatever its state, and give its row and pages back.

        Args:
          handle: a request of ``prefill_paged`` (ended or not), or a handle of ``open_request``.

        Raises:
          StaleHandleError: it was released before; nothing has changed.
        """
        session = self._started()
        if isinstance(handle, Request):
            stream = self._streams.get(handle.id)
            if stream is None or stream.request is not handle:
                raise StaleHandleError(f"request {handle.id} was released before, or is not this engine's")
            del self._streams[handle.id]
            session.driver.cancel(handle.id)
            return
        request = self._request_of(handle)
        if request is None:
            session.runtime.release(handle)
            self._handles.pop(handle.row, None)
        elif request.id in self._streams:
            self.release(request)
        else:
            session.driver.cancel(request.id)

    def release_pages(self, slot: int) -> None:
        """MaxText's old call: end whatever holds row ``slot`` and give its pages back.

        Raises:
          StaleHandleError: nothing does. (MaxText 0.2.5 prints a warning and does nothing.)
        """
        if not self.paged:
            super().release_pages(slot)
            return
        running = [request.handle for request in self._started().driver.scheduler.running]
        handle = {one.row: one for one in [*self._handles.values(), *running] if one is not None}.get(slot)
        if handle is None:
            raise StaleHandleError(f"slot {slot} holds no request")
        self.release(handle)

    # --- requests that the caller drives --------------------------------------------------------------------

    def open_request(self) -> RequestHandle | None:
        """A row to drive with ``paged_step``; None when all are taken."""
        handle = self._started().runtime.open()
        if handle is not None:
            self._handles[handle.row] = handle
        return handle

    def paged_step(self, slices: Sequence[RequestSlice]) -> StepOutcome | None:
        """One step under the caller's own policy: ``prepare_step`` and ``run_step`` of the session's runtime.

        Args:
          slices: of handles from ``open_request``, at most one each.

        Returns:
          The dispatched step (``read()`` waits for it); None when the pool has no room: nothing has changed.

        Raises:
          PageStateError: a handle is the driver's, or its slice does not start where its K/V ends.
          StaleHandleError: a handle was released.
        """
        runtime = self._started().runtime
        for piece in slices:
            request = self._request_of(piece.handle)
            if request is not None:
                raise PageStateError(f"row {piece.handle.row} belongs to request {request.id}: generate_paged runs it")
        prepared = runtime.prepare_step(slices)
        return None if prepared is None else runtime.run_step(prepared)

    # --- what MaxEngine has and paging has not ----------------------------------------------------------------

    prefill = _dense("prefill", "use prefill_paged")
    prefill_aot = _dense("prefill_aot", "use prefill_paged")
    prefill_concat = _dense("prefill_concat", "prefill_paged packs by itself")
    prefill_multisampling = _dense("prefill_multisampling", "call prefill_paged once per sample, with other seeds")
    prefill_multisampling_aot = _dense("prefill_multisampling_aot", "call prefill_paged once per sample")
    generate = _dense("generate", "use generate_paged")
    generate_aot = _dense("generate_aot", "use generate_paged")
    insert = _dense("insert", "prefill_paged inserts by itself")
    insert_partial = _dense("insert_partial", "prefill_paged inserts by itself")
    bulk_insert = _dense("bulk_insert", "prefill_paged inserts by itself")
    init_decode_state = _dense("init_decode_state", "use init_paged_runtime")
    aot_compile = _dense("aot_compile", "programs compile at their first step, and are cached on disk")
    get_prefix_destination_sharding = _dense("get_prefix_destination_sharding", "there are no prefixes to move")
    load_single_adapter = _dense("load_single_adapter", "adapters are not supported")
    apply_adapter = _dense("apply_adapter", "adapters are not supported")
    unapply_adapter = _dense("unapply_adapter", "adapters are not supported")
    quantize_params = _dense("quantize_params", "quantised weights are not supported")

    def get_tokenizer(self) -> Any:
        """What ``build_tokenizer`` takes: here the configuration, where MaxText needs JetStream's types."""
        return self.config if self.paged else super().get_tokenizer()

    def build_tokenizer(self, metadata: Any) -> Any:
        """The tokenizer that a configuration names."""
        return load_tokenizer(metadata) if self.paged else super().build_tokenizer(metadata)

    @property
    def max_concurrent_decodes(self) -> int:
        """Requests that run at once."""
        return self._assembly.max_num_seqs if self.paged else super().max_concurrent_decodes

    def _started(self) -> PagedSession:
        if self.session is None:
            raise ConfigError("the paged runtime was not started: call init_paged_runtime(load_params())")
        return self.session

    def _worker(self) -> PagedInferenceWorker:
        self._started()
        assert self.worker is not None
        return self.worker

    def _request_of(self, handle: RequestHandle) -> Request | None:
        """The driver's request behind a live handle."""
        session = self._started()
        return session.driver.scheduler.request_of(handle) if session.control.page_map.is_live(handle) else None
