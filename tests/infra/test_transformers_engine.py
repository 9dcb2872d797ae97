"""The transformers engine against plain one-by-one forwards of the same small models, without cache or padding."""

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from drivetrain_backend_api import DataError, DrivetrainError, IllegalStateError, load_implementation, load_spec
from drivetrain_backend_api.weights import WeightPlan, flatten, plan_buckets, unflatten
from drivetrain_infra.config import PlacementConfig
from drivetrain_infra.engines.base import (
    ROLLOUT_ENGINES,
    EngineSettings,
    FinishReason,
    GenerateRequest,
    Generation,
    PauseMode,
    SamplingParams,
)
from drivetrain_infra.engines.sampling import uniforms
from drivetrain_infra.engines.transformers_engine import TransformersEngine
from drivetrain_infra.engines.transformers_spec import SPEC, TransformersEngineConfig
from drivetrain_infra.weight_sync.checksum import checksum_bucket

EOS = 0
VOCAB = 264
MAX_LENGTH = 96

# float32 models of two layers: cached and uncached attention sum in other orders
LOG_PROB_TOLERANCE = 2e-5


def build_model(kind: str, *, seed: int = 0, tied: bool = True) -> Any:
    torch.manual_seed(seed)
    wide: dict[str, Any] = {"initializer_range": 0.3, "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": None}
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_positions=MAX_LENGTH, n_embd=32, n_layer=2, n_head=2, **wide)
        )
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": tied,
    }
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**shape, **wide, sliding_window=6))
    return Qwen3ForCausalLM(Qwen3Config(**shape, **wide))


def save_folder(folder: Path, model: Any) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(["<eos>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small models only lose by more
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_folder(root / kind, build_model(kind)) for kind in ("qwen3", "gpt2", "mistral")}


def start_engine(folder: str, *, dtype: str = "float32", max_batch_size: int = 64) -> TransformersEngine:
    options = TransformersEngineConfig(engine_max_batch_size=max_batch_size)
    engine = TransformersEngine(
        EngineSettings(model=folder, device="cpu", dtype=dtype, trust_remote_code=False, options=options)
    )
    engine.start()
    return engine


@pytest.fixture
def engine(folders: dict[str, str]) -> Iterator[TransformersEngine]:
    engine = start_engine(folders["qwen3"])
    yield engine
    engine.close()


def make_requests(count: int, **sampling: Any) -> list[GenerateRequest]:
    """Requests of uneven prompt length; every third prompt occurs twice."""
    generator = torch.Generator().manual_seed(11)
    prompts = [
        tuple(torch.randint(1, VOCAB, (2 + 5 * index % 13,), generator=generator).tolist()) for index in range(count)
    ]
    prompts[1::3] = prompts[0::3][: len(prompts[1::3])]
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})
    return [GenerateRequest(prompt_ids=one, sampling=params, seed=(5, 0, index)) for index, one in enumerate(prompts)]


def load_plain(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def plain_logits(model: Any, request: GenerateRequest, made: Generation) -> torch.Tensor:
    """Logits over temperature that predict each response token, from one forward of one unpadded sequence."""
    ids = torch.tensor([[*request.prompt_ids, *made.token_ids]])
    logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
    return logits / (request.sampling.temperature or 1.0)


def plain_log_probs(model: Any, request: GenerateRequest, made: Generation) -> torch.Tensor:
    log_probs = torch.log_softmax(plain_logits(model, request, made), dim=-1)
    return log_probs.gather(1, torch.tensor(made.token_ids)[:, None]).squeeze(1)


def assert_drawn_from_own_stream(model: Any, request: GenerateRequest, made: Generation) -> None:
    """Each token inverts the plain model's cumulative distribution at the next number of the request's stream."""
    logits = plain_logits(model, request, made).double()
    tokens = torch.tensor(made.token_ids)[:, None]
    if request.sampling.temperature == 0:
        assert bool((logits.gather(1, tokens)[:, 0] >= logits.max(dim=-1).values - LOG_PROB_TOLERANCE).all())
        return
    probabilities = torch.softmax(logits, dim=-1)
    upper = probabilities.cumsum(dim=-1).gather(1, tokens)[:, 0]
    lower = upper - probabilities.gather(1, tokens)[:, 0]
    uniform = torch.from_numpy(uniforms(request.seed, len(tokens)))
    assert bool((lower - LOG_PROB_TOLERANCE <= uniform).all())
    assert bool((uniform <= upper + LOG_PROB_TOLERANCE).all())


def assert_ended_rightly(request: GenerateRequest, made: Generation) -> None:
    """It went on to the model's own end of sequence, or to the limit."""
    assert EOS not in made.token_ids[:-1]
    limit = min(request.sampling.max_new_tokens, MAX_LENGTH - len(request.prompt_ids))
    assert len(made.token_ids) == limit or made.token_ids[-1] == EOS
    assert made.finish_reason is (FinishReason.STOP if made.token_ids[-1] == EOS else FinishReason.LENGTH)


def plan_of(model: Any, *, dtype: torch.dtype | None = None, bucket_bytes: int = 8192) -> tuple[WeightPlan, list[Any]]:
    """Export plan and buckets of a model, as a trainer makes them: every parameter once."""
    tensors = {name: one.detach().to(dtype or one.dtype) for name, one in model.named_parameters()}
    plan = plan_buckets([(name, tuple(one.shape), one.dtype, 0) for name, one in tensors.items()], bucket_bytes)
    buckets = [
        flatten([tensors[one.name] for one in plan.bucket(index)], plan.bucket(index), device="cpu")
        for index in range(plan.num_buckets)
    ]
    return plan, buckets


def update(engine: TransformersEngine, model: Any, version: int) -> None:
    plan, buckets = plan_of(model)
    engine.pause(PauseMode.DRAIN)
    engine.flush_cache()
    engine.begin_weight_update(plan)
    for index, data in enumerate(buckets):
        engine.load_weights(unflatten(data, plan.bucket(index)))
        assert engine.weight_checksum(plan.bucket(index)) == checksum_bucket(data, plan.bucket(index))
    engine.commit_weight_update(version)
    engine.resume()


# -- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mistral"])
def test_tokens_and_log_probs_are_those_of_plain_forwards(folders: dict[str, str], kind: str) -> None:
    engine, plain = start_engine(folders[kind]), load_plain(folders[kind])
    for sampling in ({}, {"temperature": 0.6}, {"temperature": 0.0}):
        requests = make_requests(10, **sampling)
        for request, made in zip(requests, engine.generate(requests), strict=True):
            assert_drawn_from_own_stream(plain, request, made)
            assert_ended_rightly(request, made)
            torch.testing.assert_close(
                torch.tensor(made.log_probs), plain_log_probs(plain, request, made), atol=LOG_PROB_TOLERANCE, rtol=0
            )


def test_log_probs_are_over_the_whole_vocabulary_under_top_k_and_top_p(
    folders: dict[str, str], engine: TransformersEngine
) -> None:
    plain = load_plain(folders["qwen3"])
    requests = make_requests(8, temperature=0.9, top_k=20, top_p=0.8)
    for request, made in zip(requests, engine.generate(requests), strict=True):
        torch.testing.assert_close(
            torch.tensor(made.log_probs), plain_log_probs(plain, request, made), atol=LOG_PROB_TOLERANCE, rtol=0
        )


def test_bfloat16_log_probs_are_float32_of_the_bfloat16_logits(folders: dict[str, str]) -> None:
    requests = make_requests(6)
    made = start_engine(folders["qwen3"], dtype="bfloat16").generate(requests)
    plain = load_plain(folders["qwen3"]).bfloat16()
    for request, one in zip(requests, made, strict=True):
        # bfloat16 keeps 8 bits: logits of up to 8 differ by steps of 1/32, over two layers by a few of them
        torch.testing.assert_close(torch.tensor(one.log_probs), plain_log_probs(plain, request, one), atol=0.25, rtol=0)


def test_the_same_requests_give_the_same_bits(engine: TransformersEngine) -> None:
    requests = make_requests(20, top_p=0.9)
    assert engine.generate(requests) == engine.generate(requests)


def test_a_sample_depends_on_its_request_alone(folders: dict[str, str], engine: TransformersEngine) -> None:
    # few likely tokens: a rounding that moves one over the border between two of them is then rarer than 1e-3 in all
    requests = make_requests(15, temperature=0.5)
    whole = engine.generate(requests)
    small_batches = start_engine(folders["qwen3"], max_batch_size=4).generate(requests)
    backwards = engine.generate(requests[::-1])[::-1]
    alone = [engine.generate([one])[0] for one in requests]
    for other in (small_batches, backwards, alone):
        for mine, theirs in zip(whole, other, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.finish_reason == theirs.finish_reason
            assert mine.log_probs == pytest.approx(theirs.log_probs, abs=LOG_PROB_TOLERANCE)


def test_requests_of_different_parameters_keep_their_own_in_one_batch(engine: TransformersEngine) -> None:
    kinds: list[dict[str, Any]] = [
        {"max_new_tokens": 2},
        {"temperature": 0.0, "max_new_tokens": 25},
        {"stop_token_ids": tuple(range(0, VOCAB, 3)), "max_new_tokens": 25},
        {"top_k": 2, "stop_token_ids": tuple(range(1, VOCAB, 4)), "max_new_tokens": 9},
        {"temperature": 0.4, "max_new_tokens": 17},
        {"top_p": 0.3, "stop": ("a", "7"), "max_new_tokens": 25},
    ]
    requests = [
        dataclasses.replace(one, sampling=SamplingParams(**kinds[index % len(kinds)]))
        for index, one in enumerate(make_requests(24))
    ]
    for request, made in zip(requests, engine.generate(requests), strict=True):
        (alone,) = engine.generate([request])
        assert (made.token_ids, made.finish_reason) == (alone.token_ids, alone.finish_reason)
        ends = [place for place, token in enumerate(made.token_ids) if token in (EOS, *request.sampling.stop_token_ids)]
        assert not ends or ends == [len(made.token_ids) - 1]
        assert len(made.token_ids) == request.sampling.max_new_tokens or made.finish_reason is FinishReason.STOP


def test_only_the_seed_tells_samples_of_one_prompt_apart(engine: TransformersEngine) -> None:
    request = make_requests(1)[0]
    group = [dataclasses.replace(request, seed=(5, 0, index)) for index in range(8)]
    first, *rest = engine.generate([*group, group[0]])
    assert len({one.token_ids for one in [first, *rest]}) == 8
    assert rest[-1].token_ids == first.token_ids


def test_no_requests_give_no_generations(engine: TransformersEngine) -> None:
    assert engine.generate([]) == []


# -- how a generation ends --------------------------------------------------------------------------------------------


def test_stop_tokens_of_request_and_model_end_a_generation_and_are_kept(engine: TransformersEngine) -> None:
    free = make_requests(30, max_new_tokens=40)
    stops = tuple(range(1, VOCAB, 9))
    stopped = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, stop_token_ids=stops)) for one in free
    ]
    reasons = set()
    for whole, cut in zip(engine.generate(free), engine.generate(stopped), strict=True):
        ends = [place for place, token in enumerate(whole.token_ids) if token in stops]
        length = ends[0] + 1 if ends else len(whole.token_ids)
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.log_probs == pytest.approx(whole.log_probs[:length], abs=LOG_PROB_TOLERANCE)
        assert (cut.finish_reason is FinishReason.STOP) == (cut.token_ids[-1] in (EOS, *stops))
        assert EOS not in whole.token_ids[:-1]
        reasons |= {(whole.token_ids[-1] == EOS, whole.finish_reason)}
    assert reasons == {(True, FinishReason.STOP), (False, FinishReason.LENGTH)}


def test_a_stop_string_ends_a_generation_where_its_text_first_contains_it(engine: TransformersEngine) -> None:
    tokenizer = engine._lm.tokenizer
    free = make_requests(12, max_new_tokens=30)
    whole = engine.generate(free)
    for request, made in zip(free, whole, strict=True):
        if len(made.token_ids) < 20:
            continue
        # the text of three tokens in the middle, whole characters or not, as a text of the response has it
        stop = tokenizer.decode(made.token_ids[10:13])
        if "�" in stop:
            continue
        lengths = [n for n in range(1, len(made.token_ids) + 1) if stop in tokenizer.decode(made.token_ids[:n])]
        sampling = dataclasses.replace(request.sampling, stop=("never in it, this", stop))
        others = [one for one in free if one is not request]
        cut = engine.generate([*others, dataclasses.replace(request, sampling=sampling)])
        assert cut[-1].token_ids == made.token_ids[: lengths[0]]
        assert cut[-1].finish_reason is FinishReason.STOP
        assert [one.token_ids for one in cut[:-1]] == [
            one.token_ids for one, other in zip(whole, free, strict=True) if other is not request
        ]
        return
    pytest.fail("no response had whole characters in its middle; choose another seed")


def test_a_stop_string_of_several_bytes_a_character_is_found(folders: dict[str, str], tmp_path: Path) -> None:
    engine = start_engine(folders["qwen3"])
    tokenizer = engine._lm.tokenizer
    word = tokenizer.encode("né€d", add_special_tokens=False)
    assert len(word) == 7
    # a model that repeats the word: a table of "next token" in the head, over one-hot hidden states
    model = build_model("qwen3", tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        for place, token in enumerate(word):
            model.model.embed_tokens.weight[token, place] = 1.0
            model.lm_head.weight[word[(place + 1) % len(word)], place] = 10.0
    engine = start_engine(save_folder(tmp_path / "repeats", model))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=30, stop=("dné€",))
    (made,) = engine.generate([GenerateRequest(prompt_ids=(word[0],), sampling=sampling, seed=(0,))])
    assert tokenizer.decode(made.token_ids) == "é€dné€"
    assert made.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_response_ends_at_the_longest_sequence_of_the_model(folders: dict[str, str], kind: str) -> None:
    engine, plain = start_engine(folders[kind]), load_plain(folders[kind])
    sampling = SamplingParams(max_new_tokens=MAX_LENGTH, temperature=0.5)
    lengths = (MAX_LENGTH - 1, MAX_LENGTH - 4, 3, 5, 8)
    prompts = [tuple(1 + (index * 31 + place) % 200 for place in range(n)) for index, n in enumerate(lengths)]
    requests = [GenerateRequest(prompt_ids=one, sampling=sampling, seed=(1, i)) for i, one in enumerate(prompts)]
    for request, made in zip(requests, engine.generate(requests), strict=True):
        assert_drawn_from_own_stream(plain, request, made)
        assert_ended_rightly(request, made)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_ids": ()}, "empty"),
        ({"prompt_ids": (5,) * MAX_LENGTH}, f"{MAX_LENGTH} tokens.*--rollout-max-prompt-len"),
        ({"prompt_ids": (5, VOCAB)}, f"outside 0..{VOCAB - 1}"),
        ({"prompt_ids": (-1, 5)}, f"outside 0..{VOCAB - 1}"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature -1"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature nan"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p 0"),
        ({"sampling": SamplingParams(top_k=-1)}, "top_k -1"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "max_new_tokens 0"),
        ({"sampling": SamplingParams(stop=("a", ""))}, "empty stop string"),
    ],
)
def test_a_request_that_cannot_work_is_named(engine: TransformersEngine, change: dict[str, Any], words: str) -> None:
    requests = make_requests(4)
    requests[2] = dataclasses.replace(requests[2], **change)
    with pytest.raises(DataError, match=rf"request 2 of 4 \(seed \[5, 0, 2\]\).*{words}"):
        engine.generate(requests)


# -- pause and abort --------------------------------------------------------------------------------------------------


class BackgroundGenerate:
    """A `generate` in another thread, known to be under way once constructed."""

    def __init__(self, engine: TransformersEngine, requests: list[GenerateRequest], *, after_forwards: int) -> None:
        self.made: list[Generation] = []
        self._forwards_left = after_forwards
        self._under_way = threading.Event()
        self._hook = engine._lm.model.register_forward_hook(self._count)
        self._thread = threading.Thread(target=lambda: self.made.extend(engine.generate(requests)))
        self._thread.start()
        assert self._under_way.wait(30)

    def _count(self, *_: object) -> None:
        self._forwards_left -= 1
        if self._forwards_left <= 0:
            self._under_way.set()
            time.sleep(0.02)  # the rest goes slowly, so that a pause comes before its end

    def join(self) -> list[Generation]:
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._hook.remove()
        return self.made


def test_abort_ends_requests_at_their_next_token_with_what_they_have(folders: dict[str, str]) -> None:
    engine = start_engine(folders["qwen3"], max_batch_size=4)
    requests = make_requests(10, max_new_tokens=60)
    whole = engine.generate(requests)
    background = BackgroundGenerate(engine, requests, after_forwards=5)
    engine.pause(PauseMode.ABORT)
    assert not engine._generating.locked()  # it returned only when nothing ran any more
    made = background.join()
    aborted = [one for one in made if one.finish_reason is FinishReason.ABORT]
    assert 0 < max(len(one.token_ids) for one in aborted) < 60
    assert sum(not one.token_ids for one in aborted) >= 6  # the batches that had not begun
    for one, full in zip(made, whole, strict=True):
        assert one.token_ids == full.token_ids[: len(one.token_ids)]
        assert len(one.log_probs) == len(one.token_ids)
    engine.resume()
    assert engine.generate(requests) == whole


def test_drain_lets_requests_end_and_refuses_new_ones(engine: TransformersEngine) -> None:
    requests = make_requests(6, max_new_tokens=20)
    whole = engine.generate(requests)
    background = BackgroundGenerate(engine, requests, after_forwards=3)
    engine.pause(PauseMode.DRAIN)
    assert not engine._generating.locked()
    assert background.join() == whole
    with pytest.raises(IllegalStateError, match=r"generate\(\).*PAUSED.*SERVING.*resume\(\)"):
        engine.generate(requests)
    engine.pause(PauseMode.ABORT)
    engine.resume()
    assert engine.generate(requests) == whole


def test_calls_out_of_order_are_refused_by_name(folders: dict[str, str]) -> None:
    options = TransformersEngineConfig()
    engine = TransformersEngine(
        EngineSettings(model=folders["qwen3"], device="cpu", dtype="float32", trust_remote_code=False, options=options)
    )
    plan, _ = plan_of(build_model("qwen3"))
    calls: dict[str, Any] = {
        "start": engine.start,
        "generate": lambda: engine.generate([]),
        "pause": lambda: engine.pause(PauseMode.DRAIN),
        "resume": engine.resume,
        "flush_cache": engine.flush_cache,
        "begin_weight_update": lambda: engine.begin_weight_update(plan),
        "load_weights": lambda: engine.load_weights([]),
        "weight_checksum": lambda: engine.weight_checksum([]),
        "commit_weight_update": lambda: engine.commit_weight_update(1),
    }

    def refuses(state: str, names: set[str]) -> None:
        for name in names:
            with pytest.raises(
                IllegalStateError, match=rf"{name}\(\) is illegal while the engine is {state}; it needs"
            ):
                calls[name]()

    refuses("NEW", set(calls) - {"start"})
    engine.start()
    updating = {"load_weights", "commit_weight_update"}
    refuses("SERVING", {"start", "resume", "flush_cache", "begin_weight_update"} | updating)
    engine.pause(PauseMode.DRAIN)
    refuses("PAUSED", {"start", "generate"} | updating)
    engine.begin_weight_update(plan)
    refuses("UPDATING", {"start", "generate", "resume"})
    engine.close()
    engine.close()
    refuses("CLOSED", set(calls))


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_an_update_makes_the_engine_the_other_model(folders: dict[str, str], tmp_path: Path, kind: str) -> None:
    engine, other = start_engine(folders[kind]), build_model(kind, seed=1)
    requests = make_requests(8)
    before = engine.generate(requests)
    assert {one.weight_version for one in before} == {0}
    update(engine, other, version=7)
    after = engine.generate(requests)
    assert {one.weight_version for one in after} == {7}
    fresh = start_engine(save_folder(tmp_path / "other", other)).generate(requests)
    assert [(one.token_ids, one.log_probs) for one in after] == [(one.token_ids, one.log_probs) for one in fresh]
    assert [one.token_ids for one in after] != [one.token_ids for one in before]
    model = engine._lm.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_tied_tensor_may_come_under_either_of_its_names(engine: TransformersEngine) -> None:
    tensors = dict(build_model("qwen3", seed=1).named_parameters())
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    plan = plan_buckets([(name, tuple(one.shape), one.dtype, 0) for name, one in tensors.items()], 2**20)
    engine.pause(PauseMode.DRAIN)
    engine.begin_weight_update(plan)
    engine.load_weights((name, one.detach()) for name, one in tensors.items())
    engine.commit_weight_update(1)
    assert torch.equal(engine._lm.model.get_input_embeddings().weight, tensors["lm_head.weight"])


def test_a_half_updated_engine_never_serves_until_a_whole_update(engine: TransformersEngine) -> None:
    plan, buckets = plan_of(build_model("qwen3", seed=1))
    engine.pause(PauseMode.DRAIN)
    engine.begin_weight_update(plan)
    for index in range(plan.num_buckets - 1):
        engine.load_weights(unflatten(buckets[index], plan.bucket(index)))
    last = plan.bucket(plan.num_buckets - 1)
    with pytest.raises(DataError, match=rf"lacks {len(last)} of {len(plan.entries)} tensors, first {last[0].name}"):
        engine.commit_weight_update(3)
    for call in (engine.resume, lambda: engine.generate(make_requests(1))):
        with pytest.raises(IllegalStateError, match=r"UPDATING.*whole weight update"):
            call()
    assert engine.weight_version == 0
    update(engine, build_model("qwen3", seed=2), version=4)
    assert engine.generate(make_requests(1))[0].weight_version == 4


def edited(plan: WeightPlan, place: int, **changes: Any) -> WeightPlan:
    entries = list(plan.entries)
    entries[place] = dataclasses.replace(entries[place], **changes)
    return WeightPlan(entries=tuple(entries))


def test_a_plan_that_does_not_fit_changes_nothing_and_names_the_tensor(engine: TransformersEngine) -> None:
    plan, _ = plan_of(build_model("qwen3", seed=1))
    name = plan.entries[3].name
    head = dataclasses.replace(plan.entries[0], name="lm_head.weight")
    assert plan.entries[0].name == "model.embed_tokens.weight"
    wrong = {
        "holds model.extra.weight, which the engine's model does not have": edited(plan, 3, name="model.extra.weight"),
        rf"gives {name} shape \[3, 4\], the engine's model has": edited(plan, 3, shape=(3, 4)),
        rf"gives {name} as float64, which the engine's float32 cannot hold": edited(plan, 3, dtype="float64"),
        rf"gives {name} as int32": edited(plan, 3, dtype="int32"),
        rf"lacks {name}": WeightPlan(entries=plan.entries[:3] + plan.entries[4:]),
        "holds lm_head.weight and model.embed_tokens.weight, which are one tensor": WeightPlan(
            entries=(*plan.entries, head)
        ),
        "lacks model.embed_tokens.weight": WeightPlan(entries=plan.entries[1:]),
    }
    before = engine.weight_checksum(plan.entries)
    engine.pause(PauseMode.DRAIN)
    for words, bad in wrong.items():
        with pytest.raises(DataError, match=words):
            engine.begin_weight_update(bad)
    assert engine.weight_checksum(plan.entries) == before
    engine.resume()
    assert engine.generate(make_requests(1))[0].weight_version == 0


def test_tensors_other_than_planned_are_refused(engine: TransformersEngine) -> None:
    plan, _ = plan_of(build_model("qwen3", seed=1))
    name, shape = plan.entries[1].name, plan.entries[1].shape
    engine.pause(PauseMode.DRAIN)
    engine.begin_weight_update(plan)
    with pytest.raises(DataError, match=r"sent model.other, which is not in the weight plan"):
        engine.load_weights([("model.other", torch.zeros(2))])
    with pytest.raises(DataError, match=rf"sent {name} as float32 \[1\], but the weight plan says float32"):
        engine.load_weights([(name, torch.zeros(1))])
    with pytest.raises(DataError, match=rf"sent {name} as bfloat16"):
        engine.load_weights([(name, torch.zeros(shape, dtype=torch.bfloat16))])


def test_bfloat16_weights_widen_exactly_into_a_float32_engine(engine: TransformersEngine) -> None:
    model = build_model("qwen3", seed=1)
    plan, buckets = plan_of(model, dtype=torch.bfloat16)
    engine.pause(PauseMode.DRAIN)
    engine.begin_weight_update(plan)
    for index, data in enumerate(buckets):
        engine.load_weights(unflatten(data, plan.bucket(index)))
        assert engine.weight_checksum(plan.bucket(index)) == checksum_bucket(data, plan.bucket(index))
    held = dict(engine._lm.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(held[name], parameter.bfloat16().float())


def test_the_checksum_notices_two_tensors_of_one_shape_in_each_others_place(engine: TransformersEngine) -> None:
    plan, buckets = plan_of(build_model("qwen3", seed=1), bucket_bytes=2**20)
    tensors = dict(unflatten(buckets[0], plan.entries))
    one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    engine.pause(PauseMode.DRAIN)
    engine.begin_weight_update(plan)
    engine.load_weights(tensors.items())
    assert engine.weight_checksum(plan.entries) != checksum_bucket(buckets[0], plan.entries)


def test_diverged_weights_are_an_error_and_not_random_tokens(engine: TransformersEngine) -> None:
    model = build_model("qwen3", seed=1)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    update(engine, model, version=1)
    with pytest.raises(DrivetrainError, match=r"not finite.*--lr"):
        engine.generate(make_requests(2))


# -- loading and discovery --------------------------------------------------------------------------------------------


def test_a_broken_model_folder_is_named(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"cannot load the model folder {tmp_path / 'nowhere'}"):
        start_engine(str(tmp_path / "nowhere"))
    model = build_model("qwen3")
    folder = save_folder(tmp_path / "lacking", model)
    weights = {name: one for name, one in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    weights.pop("lm_head.weight")
    model.save_pretrained(folder, state_dict=weights)
    with pytest.raises(
        DataError, match=r"lacks 1 of its model's tensors, first model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        start_engine(folder)


def test_the_engine_is_found_by_name() -> None:
    spec = load_spec(ROLLOUT_ENGINES, "transformers")
    assert spec is SPEC
    assert load_implementation(ROLLOUT_ENGINES, spec) is TransformersEngine
    assert spec.probe().available
    assert "transformers" in spec.probe().detail


def test_its_spec_imports_nothing_heavy() -> None:
    code = (
        "import sys, drivetrain_infra.engines.transformers_spec as s; s.SPEC.probe(); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_an_engine_over_several_devices_is_refused_with_the_flag() -> None:
    fits = SimpleNamespace(placement=PlacementConfig(rollout_num_gpus=4))
    assert SPEC.validate(fits) == []
    spread = SimpleNamespace(placement=PlacementConfig(rollout_num_gpus=4, rollout_num_gpus_per_engine=2))
    (finding,) = SPEC.validate(spread)
    assert "--rollout-num-gpus-per-engine 2" in finding
