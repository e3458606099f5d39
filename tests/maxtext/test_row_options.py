"""Options of rows, from a file to its records and through ``OfflineEngine``: asked, done, and written as documented."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_control.logit_options import LogitOptions
from kv_control.plan import GREEDY, SamplingSpec
from tests.completions import PROMPTS, as_request, assert_whole, token_lists
from tests.fakes import VOCAB, checksum, make_driver
from tests.logit_oracle import changed_logits, greedy_completion
from tests.parity import assert_teacher_forced, log_softmax
from tests.tiny_models import dense_model

if TYPE_CHECKING:
    from maxtext_paged import OfflineEngine

pytestmark = pytest.mark.maxtext


# --- a file's rows, over the checksum model ------------------------------------------------------------------


class NumberTokenizer:
    """A token is its number and a space."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))

    def decode(self, ids: Any) -> str:
        return "".join(f"{token} " for token in ids)

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()


def model(tokens: Any) -> Any:
    return np.float32(3.5) - np.abs(np.arange(VOCAB) - checksum(tokens) % VOCAB).astype(np.float32)


@pytest.fixture(scope="module")
def session() -> Any:
    from types import SimpleNamespace

    driver = make_driver(64, max_num_seqs=4, max_num_batched_tokens=8, prefix_cache=True)
    driver.runtime.update_params(driver.runtime.params + np.float32(3.5))
    options = SimpleNamespace(paged_file_order="auto")
    control = driver.runtime.control
    return SimpleNamespace(
        driver=driver,
        control=control,
        runtime=driver.runtime,
        max_num_seqs=4,
        options=options,
        num_native_products=lambda: 0,
    )


def run_file(session: Any, *rows: Any, parquet: bool = False) -> list[dict[str, Any]]:
    """The records of a file of these rows, in order."""
    from maxtext_paged.cli.generate import Job
    from maxtext_paged.cli.interruption import Interruption
    from maxtext_paged.cli.progress import JobProgress
    from maxtext_paged.formats.sources import open_source
    from maxtext_paged.intake import Intake
    from maxtext_paged.report.counts import JobCounts
    from maxtext_paged.report.recorder import Recorder
    from maxtext_paged.worker import PagedInferenceWorker

    tokenizer: Any = NumberTokenizer()
    source = open_source(
        "in", as_parquet(rows) if parquet else io.BytesIO(b"\n".join(json.dumps(r).encode() for r in rows))
    )
    output = io.BytesIO()
    with Interruption() as interruption:
        Job(
            worker=PagedInferenceWorker(session, tokenizer=tokenizer),
            session=session,
            tokenizer=tokenizer,
            intake=Intake(tokenizer, GREEDY, vocab_size=VOCAB, max_model_len=64),
            recorder=Recorder(JobCounts(total=len(rows))),
            output=output,
            interruption=interruption,
            progress=JobProgress(len(rows), io.StringIO()),
            form=source.form,
        ).run(source.rows())
    found = [json.loads(line) for line in output.getvalue().splitlines()]
    return sorted(found, key=lambda record: record["index"])


def as_parquet(rows: Any) -> io.BytesIO:
    """Rows as columns; ``logit_bias`` as a map."""
    import pyarrow
    import pyarrow.parquet

    kinds: dict[str, Any] = {"logit_bias": pyarrow.map_(pyarrow.string(), pyarrow.float64())}
    names = {name for row in rows for name in row}
    columns = {
        name: pyarrow.array([_pairs(row.get(name)) for row in rows], type=kinds.get(name)) for name in sorted(names)
    }
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    file.seek(0)
    return file


def _pairs(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


PROMPT = [7, 7, 30, 8]
TEXT = "7 7 30 8 "
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.9,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"3": 4.5, "96": -100},
}
NUMBERS = {
    "repetition_penalty": 1.9,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.25,
    "logit_bias": {3: 4.5, 96: -100},
}


def expected(num: int, **options: Any) -> list[int]:
    return greedy_completion(model, PROMPT, num, **options)


def logprob(tokens: list[int], token: int) -> float:
    return float(log_softmax(model(tokens))[token])


@pytest.mark.parametrize("parquet", [False, True])
def test_a_files_options_do_what_the_formulas_say_in_json_lines_and_parquet(session: Any, parquet: bool) -> None:
    ends = list(range(20, 60))
    rows = [
        {"id": 0, "prompt": TEXT, "max_tokens": 14, **EVERYTHING},
        {"id": 1, "prompt": TEXT, "max_tokens": 14},
        {"id": 2, "prompt": TEXT, "max_tokens": 14, "min_tokens": 6, "stop_token_ids": ends},
        {"id": 3, "prompt": TEXT, "max_tokens": 14, "stop": ["9"]},
    ]
    found = run_file(session, *rows, parquet=parquet)
    assert found[0]["token_ids"] == expected(14, **NUMBERS) != found[1]["token_ids"] == expected(14)
    assert found[2]["token_ids"] == expected(14, min_tokens=6, stop_token_ids=ends)
    text = NumberTokenizer().decode(expected(14))
    assert "9" in text and found[3]["text"] == text[: text.index("9")] and found[3]["finish_reason"] == "stop"


def test_what_a_row_does_not_ask_for_is_not_in_its_record(session: Any) -> None:
    [record] = run_file(session, {"prompt": TEXT, "max_tokens": 2})
    assert not {"logprobs", "top_logprobs", "prompt_logprobs", "prompt_token_ids"} & set(record)


def test_logprobs_stand_beside_their_tokens_and_are_the_models(session: Any) -> None:
    [record] = run_file(session, {"prompt": TEXT, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, **EVERYTHING})
    ids = record["token_ids"]
    assert len(ids) == len(record["logprobs"]) == len(record["top_logprobs"]) == 5
    for place, token in enumerate(ids):
        before = PROMPT + ids[:place]
        assert record["logprobs"][place] == pytest.approx(logprob(before, token), abs=1e-5)
        best = np.lexsort((np.arange(VOCAB), -model(before)))[:2].tolist()
        assert [entry["id"] for entry in record["top_logprobs"][place]] == best


def test_a_row_of_no_new_tokens_scores_its_prompt(session: Any) -> None:
    for _ in range(2):  # the second one finds its pages cached
        [record] = run_file(session, {"tokens": PROMPT * 4, "max_tokens": 0, "prompt_logprobs": True})
        assert (record["text"], record["token_ids"], record["finish_reason"]) == ("", [], "length")
        assert record["prompt_token_ids"] == PROMPT * 4
        first, *rest = record["prompt_logprobs"]
        assert first is None  # sums begin behind it
        wanted = [logprob((PROMPT * 4)[:place], (PROMPT * 4)[place]) for place in range(1, 16)]
        assert rest == pytest.approx(wanted, abs=1e-5)
    assert record["usage"]["cached_tokens"] > 0


def test_echo_repeats_the_prompt_in_text_ids_and_logprobs(session: Any) -> None:
    ask = {"max_tokens": 2, "logprobs": True, "top_logprobs": 1, "echo": True, "n": 2}
    by_text, by_ids = run_file(session, {"prompt": TEXT, **ask}, {"tokens": PROMPT, **ask})
    for record in (by_text, by_ids):
        for choice in (record, *record["choices"]):
            assert choice["token_ids"] == PROMPT + expected(2)
            assert choice["text"] == TEXT + NumberTokenizer().decode(expected(2))
            assert len(choice["logprobs"]) == len(choice["top_logprobs"]) == 6
            assert choice["logprobs"][0] is None and choice["top_logprobs"][:4] == [None] * 4


def batch(url: str, **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in url else {"prompt": TEXT}
    return {"custom_id": url, "method": "POST", "url": url, "body": {**prompt, **body}}


def test_a_batch_file_gets_openais_shapes(session: Any) -> None:
    rows = [
        batch("/v1/completions", max_tokens=3, logprobs=2, echo=True, logit_bias={"3": 100}, stop=["77"]),
        batch("/v1/chat/completions", max_tokens=3, logprobs=True, top_logprobs=2, prompt_logprobs=0),
        batch("/v1/completions", max_tokens=1, logprobs=0),
    ]
    bodies = [record["response"]["body"] for record in run_file(session, *rows)]
    [choice] = bodies[0]["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == TEXT + "3 3 3 " == "".join(logprobs["tokens"])
    assert logprobs["text_offset"] == [0, 2, 4, 7, 9, 11, 13] and logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][4] == pytest.approx(logprob(PROMPT, 3), abs=1e-5)
    for place, entries in enumerate(logprobs["top_logprobs"][4:]):
        best = np.lexsort((np.arange(VOCAB), -model(PROMPT + [3] * place)))[:2]
        assert set(entries) == {"3 ", *(f"{token} " for token in best)}
    [chat] = bodies[1]["choices"]
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == [f"{token} " for token in expected(3)]
    assert all(len(entry["top_logprobs"]) == 2 for entry in chat["logprobs"]["content"])
    assert len(bodies[1]["prompt_logprobs"]) == 4 and bodies[1]["prompt_logprobs"][0] is None
    assert bodies[2]["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_row_that_asks_too_much_gets_an_error_and_the_others_run(session: Any) -> None:
    found = run_file(
        session,
        {"prompt": TEXT, "max_tokens": 1, "logit_bias": {"97": 1}},
        {"prompt": TEXT, "max_tokens": 1, "min_tokens": 1, "stop_token_ids": list(range(65))},
        {"prompt": TEXT, "max_tokens": 1},
    )
    assert [record["status_code"] for record in found] == [400, 500, 200]
    assert "logit_bias: id 97" in found[0]["error"]["message"]
    assert "min_tokens=1: 65 stop tokens" in found[1]["error"]["message"]


# --- a real model --------------------------------------------------------------------------------------------

OPTIONS = [
    LogitOptions(repetition_penalty=0.25, top_logprobs=3),
    LogitOptions(presence_penalty=0.2, frequency_penalty=0.1),
    LogitOptions(logit_bias={9: 8.0, 200: -100.0}),
    None,
    LogitOptions(repetition_penalty=0.5, frequency_penalty=0.3, logit_bias={5: 0.5}),
    LogitOptions(top_logprobs=20),
]


@pytest.mark.slow
def test_a_models_choices_are_those_of_its_changed_dense_logits(offline_engine: OfflineEngine) -> None:
    dense, bound = dense_model(), 2 * 2e-5
    outputs = offline_engine.batch_inference(PROMPTS, max_tokens=12, ignore_eos=True, options=OPTIONS)
    assert_whole(outputs)
    plain = offline_engine.batch_inference(PROMPTS, max_tokens=12, ignore_eos=True)
    moved = [one != other for one, other in zip(token_lists(outputs), token_lists(plain), strict=True)]
    assert moved == [True, True, True, False, True, False], moved
    assert_teacher_forced([as_request(output) for output in outputs], dense, relative=2e-5, greedy=False)
    for output, options in zip(outputs, OPTIONS, strict=True):
        tokens, n = output.token_ids.tolist(), output.prompt_length
        logits = dense.logits(output.token_ids, pad_to=64)
        given = options or LogitOptions()
        for at in range(n, len(tokens)):
            changed = changed_logits(
                logits[at - 1],
                tokens[:n],
                tokens[n:at],
                repetition_penalty=given.repetition_penalty,
                presence_penalty=given.presence_penalty,
                frequency_penalty=given.frequency_penalty,
                logit_bias=given.logit_bias,
            )
            assert changed.max() - changed[tokens[at]] <= bound * np.abs(logits).max()
            if given.top_logprobs:
                best = output.alternatives[at - n]
                assert len(best.ids) == given.top_logprobs
                row = log_softmax(logits[at - 1])
                np.testing.assert_allclose(best.logprobs, np.sort(row)[::-1][: given.top_logprobs], atol=1e-4)
                np.testing.assert_allclose(best.logprobs, row[best.ids], atol=1e-4)


def test_seeded_rows_with_options_do_not_depend_on_their_company_or_a_resume(offline_engine: OfflineEngine) -> None:
    spec = SamplingSpec(temperature=1.5, top_p=0.9)
    ask: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "sampling": spec, "seed": 3}
    together = offline_engine.batch_inference(PROMPTS, options=OPTIONS, **ask)
    for place in (4, 0, 2):  # as a resumed job would run what is missing: in another order, in other company
        [alone] = offline_engine.batch_inference([PROMPTS[place]], options=OPTIONS[place], **ask)
        assert alone.token_ids.tolist() == together[place].token_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[place].logprobs, atol=1e-4)


def test_options_do_not_compile_in_an_engine_that_is_warm(offline_engine: OfflineEngine) -> None:
    ask: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
    offline_engine.batch_inference(PROMPTS, options=OPTIONS, **ask)
    before = offline_engine.metrics().compiled
    offline_engine.batch_inference(PROMPTS[::-1], options=OPTIONS, min_tokens=2, **ask)
    assert offline_engine.metrics().compiled == before


def test_a_call_names_what_is_wrong_with_its_options(offline_engine: OfflineEngine) -> None:
    with pytest.raises(ValueError, match="options has 2 values for 1 rows"):
        offline_engine.batch_inference([PROMPTS[0]], options=OPTIONS[:2])
    with pytest.raises(ValueError, match="stop="):
        offline_engine.batch_inference([PROMPTS[0]], stop=["a", ""])
    [bad] = offline_engine.batch_inference([PROMPTS[0]], options=LogitOptions(logit_bias={256: 1.0}))
    assert bad.error is not None and "logit_bias: id 256" in bad.error


def test_a_calls_stop_strings_cut_the_text(offline_engine: OfflineEngine) -> None:
    [plain] = offline_engine.batch_inference([PROMPTS[2]], max_tokens=10, ignore_eos=True)
    said = plain.token_ids[plain.prompt_length :].tolist()
    stop = chr(said[4]) + chr(said[5])
    [output] = offline_engine.batch_inference([PROMPTS[2]], max_tokens=10, ignore_eos=True, stop=stop)
    text = "".join(map(chr, said))
    end = text.index(stop)
    assert (output.finish_reason, output.text) == ("stop", text[:end])
    assert output.token_ids[output.prompt_length :].tolist() == said[: end + 2]
