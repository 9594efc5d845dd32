"""Texts of settings, right and wrong, for `dubito.parse`: what is read must print as something that reads the same."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import dubito
from dubito.core.settings import _REGISTRY, Setting, load_all
from fuzz.engine import Case, require

NAMES = "map laplace variational rank1 batchensemble swag ensemble mcdropout snapshot sgmcmc svgd hmc training Training select.all select.last_layer select.layers select.random select.subnetwork select.subspace select.mask select.largest_variance select.largest_magnitude priors.Normal priors.Laplace priors.Mixture priors.Cauchy priors.StudentT priors.ScaleMixture priors.ByName priors.LogUniform priors.Horseshoe objectives.ELBO objectives.Renyi likelihoods.Gaussian likelihoods.Categorical rules.Magnitude rules.SignalToNoise nothing __import__ os.system lenet-5 low-rank".split(
    " "
)
ARGUMENTS = "structure weights prior prior_precision members recipe temperature train start rank epochs lr batch_size optimizer schedule clip components posterior estimator family objective kl_warmup size rule rate noise loc scale df scales shares alpha num_samples chains burn_in thinning kernel step_size target threshold scope checkpoint x __class__".split(
    " "
)
ATOMS = "1 0 -1 2.5 1e-3 1e400 -inf nan inf True False None true none kron full diag lowrank 'text' \"text\" '' [] [1,2] () (1,) {} {'a':1} {1:2} 1e12 99999999999999999999999 0x10 1_000 1j b'x' ... *a **a lambda:0 x:=1 f'{1}' a.b.c a-b-c -x +x ~x not-x 1+1 a[0] (yield) await.x 'a'*9 🙂 \x00 \\ # ; = , ) ( ] [ { } | & ~ 'unfinished".split(
    " "
)


def _known() -> list[Any]:
    load_all()
    return [cls for cls in _REGISTRY.values() if not cls.setting_name.startswith("testing")]


class Grammar:
    """Random texts, half of them well-formed."""

    def generate(self, rng: random.Random) -> Case:
        text = self._call(rng, 0)
        if rng.random() < 0.4:
            text = self._damaged(rng, text)
        if rng.random() < 0.01:
            text = rng.choice(["(", "[", "~", "-", "a.", "map("]) * rng.choice([10, 100, 3000])
        return {"text": text, "namespace": rng.choice(["", "", "", "priors", "select", "nowhere"])}

    def _call(self, rng: random.Random, depth: int) -> str:
        if rng.random() < 0.6:
            return self._proper(rng, depth)
        parts = [self._value(rng, depth + 1) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        parts += [f"{rng.choice(ARGUMENTS)}={self._value(rng, depth + 1)}" for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        return f"{rng.choice(NAMES)}({', '.join(parts)})"

    def _proper(self, rng: random.Random, depth: int) -> str:
        """A setting with some of its own arguments, mostly at values that it prints itself."""
        known = sorted(_known(), key=lambda each: each.setting_name)
        cls = rng.choice(known)
        fields = rng.sample(dataclasses.fields(cls), min(len(dataclasses.fields(cls)), rng.choice([0, 1, 1, 2, 3])))
        parts = []
        for field in fields:
            printed = repr(field.default) if field.default is not dataclasses.MISSING else ""
            own = printed if printed and rng.random() < 0.6 else self._value(rng, depth + 1)
            parts.append(f"{field.name}={own}")
        return f"{cls.setting_name}({', '.join(parts)})"

    def _value(self, rng: random.Random, depth: int) -> str:
        draw = rng.random()
        if depth < 4 and draw < 0.25:
            return self._call(rng, depth)
        if depth < 4 and draw < 0.32:
            return f"{self._value(rng, depth + 1)} {rng.choice('|&')} {self._value(rng, depth + 1)}"
        if draw < 0.36:
            return f"[{self._value(rng, depth + 1)}, {self._value(rng, depth + 1)}]" if depth < 6 else "[]"
        return rng.choice(ATOMS)

    def _damaged(self, rng: random.Random, text: str) -> str:
        for _ in range(rng.randint(1, 4)):
            at = rng.randint(0, len(text))
            piece = rng.choice([*ATOMS, " ", "\n", "\t", "(", ")", "é", "\ud800", "\u202e", "=", ","])
            text = text[:at] + piece + text[at + rng.randint(0, 3) :]
        return text

    def run(self, case: Case) -> None:
        found: Any = dubito.parse(case["text"], case["namespace"])
        require(isinstance(found, Setting), f"a {type(found).__name__} is no setting")
        printed = repr(found)
        if "nan" not in printed:  # which does not equal itself
            require(dubito.parse(printed) == found, f"{printed} reads as something else")
            require(hash(dubito.parse(printed)) == hash(found), f"{printed} has two hashes")
