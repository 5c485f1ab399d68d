"""The loss of the heads against its definition, computed by the engine, which shares no code with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.common.switches import BOOST
from megatron_nemotron3.inference.generate.decode import read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.launch import manifest
from megatron_nemotron3.launch.boosting import Boost, in_environment, requested
from megatron_nemotron3.models import get
from megatron_nemotron3.post_training.boost.heads import _uniform, train_heads
from tests.support.checkpoint_pair import Pair, pair
from tests.support.engines import text as random_text
from tests.support.parity import forward

CONFIG = get("super-tiny").but(mtp_num_layers=3)
S = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.support.world import world_of_one

    with world_of_one():
        yield pair(CONFIG, tmp_path_factory.mktemp("heads"), seed=5)


def boosted(made: Pair, boost: Boost) -> Any:
    """The model with hooks, which go when the test is over."""
    train_heads(made.model, boost)
    return made.model.train()


@pytest.fixture(autouse=True)
def without_hooks(request: pytest.FixtureRequest) -> Any:
    yield
    if "made" in request.fixturenames:
        model = request.getfixturevalue("made").model
        model.decoder.around = None
        for module in (model, model.output_layer, *model.mtp.layers):
            _keep_first(module)


def _keep_first(module: torch.nn.Module) -> None:
    """Remove the hooks that `train_heads` added: all but those of LossHooks, which are the model's first."""
    own = 1 if type(module).__name__ == "HybridModel" else 0
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in list(hooks)[own:]:
            del hooks[key]


def logits_by_definition(engine: Engine, ids: Tensor, picks: dict[int, Tensor] | None = None) -> list[Tensor]:
    """Logits of the model and of each depth [b, s - k, v] for tokens [b, s].

    Args:
        picks: depth -> number of the depth whose hidden state each position is given, [b, s].
    """
    b, s = ids.shape
    out = engine.forward(ids, engine.new_state(b))
    hidden, result, mtp = [out.hidden], [out.logits], MTP(engine, b, 3)
    for depth in (1, 2, 3):
        given = hidden[-1][:, : s - depth].clone()
        for row in range(b):
            for i in range(s - depth if picks is not None else 0):
                j = int(picks[depth][row, i])  # type: ignore[index]
                at = i + depth - 1 - j
                if j < depth and at < s:
                    given[row, i] = hidden[j][row, at]
        out = mtp.forward(depth, given, ids[:, depth:])
        hidden.append(out.hidden)
        result.append(out.logits)
    return result


def by_definition(logits: list[Tensor], boost: Boost, labels: Tensor) -> Tensor:
    """Loss [b, s], one position after the other."""
    own, b, s, t = logits[0], *labels.shape, boost.temperature
    total = torch.zeros(b, s)
    for depth, weight in enumerate(boost.weights(3), 1):
        for j in range(depth, s):
            p, q = (each.double() / t for each in (own[:, j], logits[depth][:, j - depth]))
            p, q = p.softmax(-1), q.softmax(-1)
            if boost.loss == "kl":
                found = (p * (p / q).log()).sum(-1) * t * t
            elif boost.loss == "tv":
                found = (1 - torch.minimum(p, q).sum(-1)) * t * t
            else:
                found = -q.gather(-1, labels[:, j, None]).squeeze(-1).log()
            total[:, j] += weight * found.float()
    return total


@pytest.mark.parametrize(
    "boost",
    [
        Boost(),
        Boost(temperature=2.0, decay=0.5),
        Boost("tv"),
        Boost("ce"),
        Boost(mix=0.7),
        Boost("tv", mix=1),
    ],
    ids=Boost.text,
)
def test_loss_is_its_definition(made: Pair, boost: Boost) -> None:
    source: Any = made.hf
    engine = Engine(read_weights(source, CONFIG))
    ids = random_text(engine, 2, S + 1)
    model = boosted(made, boost)
    found = forward(model, ids[:, :-1], ids[:, 1:])
    tokens = ids[:, :-1]
    picks = None
    if boost.mix:
        share = {k: _uniform(tokens, boost.seed, 0, k) for k in (1, 2, 3)}
        picks = {k: (u * k / boost.mix).long() for k, u in share.items()}
        drawn = torch.cat([(u < boost.mix).float().flatten() for u in share.values()])
        assert float(drawn.mean()) == pytest.approx(boost.mix, abs=0.12)
    # The deepest position of the text that Megatron's depth sees is followed by token 0, as the shift fills.
    expected = by_definition(logits_by_definition(engine, tokens, picks), boost, ids[:, 1:])
    torch.testing.assert_close(found.detach(), expected, rtol=2e-4, atol=2e-4)
    found.mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith("mtp."), name
    model.zero_grad()


def test_evaluation_draws_nothing(made: Pair) -> None:
    model = boosted(made, Boost(mix=1.0)).eval()
    ids = torch.randint(CONFIG.vocab_size, (1, S + 1), generator=torch.Generator().manual_seed(0))
    first, again = (forward(model, ids[:, :-1], ids[:, 1:]) for _ in range(2))
    assert torch.equal(first, again)
    logits = forward(model, ids[:, :-1])
    assert logits.shape == (1, S, CONFIG.vocab_size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss=mse", "loss=mse: use kl, tv, ce"),
        ("loss=ce,temperature=2", "loss=ce has no temperature"),
        ("mix=2", "mix=2: give 0 to 1"),
        ("steps=7", "'steps=7' is not one of loss=, temperature=, mix=, decay=, seed="),
    ],
)
def test_settings_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{BOOST}: .*{message}"):
        in_environment({BOOST: text})


def test_settings() -> None:
    assert in_environment({}) is None and in_environment({BOOST: "1"}) == Boost()
    boost = Boost("tv", 2.0, 0.5, 0.8, 3)
    assert Boost.parse(boost.text()) == boost


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("1", ["--hybrid-layer-pattern", "ME*"], "no MTP block to train: give --hybrid-layer-pattern one"),
        ("1", ["--hybrid-layer-pattern", "ME/*E", "--context-parallel-size", "2"], "another rank's; use 1"),
    ],
)
def test_command_lines_that_are_refused(text: str, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requested(words, {BOOST: text})
    assert requested(words, {}) is None


def test_adapters_and_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="NEMOTRON3_LORA is set, too"):
        requested(["--hybrid-layer-pattern", "M/*E"], {BOOST: "1", "NEMOTRON3_LORA": "dim=4"})


def test_a_run_that_goes_on_without_the_variable_is_another_one() -> None:
    """Its folder says what the heads are trained for; without it everything would be trained."""
    words = ["--hybrid-layer-pattern", "ME/*E"]
    begun = manifest.parts_of(words, {BOOST: "mix=0.5"})
    assert begun["mtp"][BOOST] == Boost(mix=0.5).text()
    assert BOOST not in manifest.parts_of(words, {})["mtp"]
    stored = manifest.parts_of_checkpoint({"nemotron3_boost": Boost(mix=0.5).text()})
    assert stored["mtp"][BOOST] == begun["mtp"][BOOST]
