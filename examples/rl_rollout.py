"""Teaches a toy policy to say even tokens: rollouts with the paged engine, updates with MaxText's own model.

Usage: rl_rollout.py [CONFIG.yml [STEPS]]; without one, configs/test/tiny.yml of this repository, with random weights.

The trainer holds MaxText's scanned model, as trainers do; the sampler takes its parameters as they are. REINFORCE: the
reward of a completion is the share of its tokens that are even.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TINY = str(Path(__file__).parents[1] / "configs" / "test" / "tiny.yml")
PROMPTS = [[5, 6, 7], [50, 60], [100, 101, 102, 103], [7]]
SAMPLES, LENGTH, RATE = 8, 12, 5.0


class Trainer:
    """MaxText's scanned model in training mode, and plain gradient ascent."""

    def __init__(self, config: Any, mesh: Any) -> None:
        from flax import nnx
        from flax.core.spmd import logical_axis_rules
        from maxtext.utils import model_creation_utils

        create = model_creation_utils.get_nnx_create_model_fn(
            config, mesh=mesh, model_mode="train", rng_key=jax.random.PRNGKey(0), quant_mode_str="train"
        )
        with logical_axis_rules(config.logical_axis_rules):
            graph, self.params, rest = nnx.split(create(), nnx.Param, ...)

        def loss(params: Any, tokens: jax.Array, weights: jax.Array) -> jax.Array:
            model = nnx.merge(graph, params, rest, copy=True)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            with logical_axis_rules(config.logical_axis_rules):
                logits = model(
                    tokens,
                    positions,
                    decoder_segment_ids=jnp.ones_like(tokens),
                    enable_dropout=False,
                    model_mode="train",
                )
            logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))[:, :-1]
            chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
            return -(chosen * weights[:, 1:]).sum() / tokens.shape[0]

        self._step = jax.jit(
            lambda params, tokens, weights: jax.tree.map(
                lambda leaf, slope: leaf - RATE * slope, params, jax.grad(loss)(params, tokens, weights)
            )
        )

    def step(self, tokens: np.ndarray, weights: np.ndarray) -> None:
        """One update."""
        self.params = self._step(self.params, jnp.asarray(tokens), jnp.asarray(weights))


def batch_of(results: list[Any]) -> tuple[np.ndarray, np.ndarray, float]:
    """Tokens, the advantage at each generated one, and the mean reward."""
    samples = [sample for result in results for sample in result.samples]
    rewards = np.array([(sample.token_ids % 2 == 0).mean() for sample in samples])
    longest = max(map(len, PROMPTS)) + LENGTH
    tokens, weights = np.zeros((len(samples), longest), np.int32), np.zeros((len(samples), longest), np.float32)
    for row, (sample, advantage) in enumerate(zip(samples, rewards - rewards.mean(), strict=True)):
        start, end = len(sample.prompt_token_ids), len(sample.prompt_token_ids) + len(sample.token_ids)
        tokens[row, :end] = [*sample.prompt_token_ids, *sample.token_ids]
        weights[row, start:end] = advantage
    return tokens, weights, float(rewards.mean())


def main(path: str = TINY, steps: str = "20") -> int:
    """Train; 1 where the sampler's logprobs left the trainer's, or nothing was learned."""
    from maxtext.configs import pyconfig

    from maxtext_paged import OfflineEngine, SamplingParams
    from maxtext_paged.config_file import read_config

    config = read_config(path, {"paged_max_num_seqs": 16})
    update = {"scan_layers": True, "attention": "dot_product"}
    trainer_config = pyconfig.HyperParameters(config._pydantic_config.model_copy(update=update))
    rewards, worst = [], 0.0
    with OfflineEngine(config, eos_ids=[]) as engine:
        trainer = Trainer(trainer_config, engine.mesh)
        for step in range(int(steps)):
            engine.update_params(trainer.params)  # scanned, as the trainer has them
            engine.wake()
            params = SamplingParams(max_tokens=LENGTH, temperature=1.0, n=SAMPLES, ignore_eos=True, seed=step)
            results = engine.generate(PROMPTS, params)
            gap = engine.logprob_gap(results)
            freed = engine.sleep()
            tokens, weights, reward = batch_of(results)
            trainer.step(tokens, weights)
            rewards.append(reward)
            worst = max(worst, gap.largest)
            print(f"step {step}: reward {reward:.3f}, largest logprob gap {gap.largest:.2g}, {freed} bytes given back")
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}, largest gap {worst:.2g}")
    return 0 if rewards[-1] > rewards[0] and worst < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
