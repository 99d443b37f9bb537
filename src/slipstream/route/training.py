"""Trains the classifier of `route.learned` on outcomes (scikit-learn, the extra `[route]`); routing itself needs none.

    outcomes -> features -> boosted trees, one ensemble an arm -> threshold from predictions on held-out folds -> Model

Settings are fixed here and were chosen by cross-validation on training questions alone. An exported model is compared
with scikit-learn's own predictions before it is returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.route.decision import RouteError
from slipstream.route.learned import Model, Trees
from slipstream.route.outcomes import Table

if TYPE_CHECKING:
    from sklearn.ensemble import GradientBoostingClassifier

Floats = npt.NDArray[np.float64]
FOLDS = 5
FEWEST = 100  # questions; fewer teach noise
CURVE_POINTS = 101


def train(data: Table, *, recover: float = 0.5, by_group: bool = False, seed: int = 0) -> Model:
    """A model whose threshold recovers the share `recover` of strong's gain in cross-validation on `data`.

    by_group: keep a group's questions in one fold, so that the threshold fits subjects that were never seen.
    Raises RouteError where there is too little to learn, or strong gains nothing over fast.
    """
    if len(data) < FEWEST:
        raise RouteError(f"{len(data)} outcomes are too few to learn from; collect at least {FEWEST}")
    if data.gain.sum() <= 0:
        raise RouteError("strong is not right more often than fast here; there is nothing to route for")
    held_out = cross_validated(data, by_group=by_group, seed=seed)
    curve = gain_curve(held_out, data.gain)
    at = next(i for i, point in enumerate(curve) if point[2] >= min(recover, 1.0) - 1e-9)
    picked = sorted({*np.linspace(0, len(curve) - 1, CURVE_POINTS).round().astype(int).tolist(), at})
    facts = {
        "questions": len(data),
        "groups": len(set(data.groups.tolist())),
        "strong_right": float(data.strong.mean()),
        "fast_right": float(data.fast.mean()),
        "recover": recover,
        "by_group": by_group,
        "seed": seed,
    }
    return Model(
        arm(data.x, data.strong, seed), arm(data.x, data.fast, seed), curve[at][0], [curve[i] for i in picked], facts
    )


def cross_validated(data: Table, *, by_group: bool, seed: int = 0) -> Floats:
    """(n,) the gain that models predict for questions they were not trained on."""
    predicted = np.empty(len(data))
    for fold in folds(data, by_group=by_group, seed=seed):
        rest = data.take(~fold)
        model = Model(arm(rest.x, rest.strong, seed), arm(rest.x, rest.fast, seed), 0.0)
        predicted[fold] = model.gain(data.x[fold])
    return predicted


def folds(data: Table, *, by_group: bool, seed: int = 0) -> list[npt.NDArray[np.bool_]]:
    """FOLDS masks (n,) that cover every question once; by_group: no group is in two. Equal texts stay together."""
    keys = data.groups if by_group else np.array(data.texts)
    names, index = np.unique(keys, return_inverse=True)
    if len(names) < FOLDS:
        raise RouteError(
            f"{len(names)} groups are too few to hold some out; give at least {FOLDS}, or leave by_group out"
        )
    which = np.random.default_rng(seed).permutation(len(names)) % FOLDS
    return [which[index] == fold for fold in range(FOLDS)]


def gain_curve(scores: Floats, gain: Floats) -> list[tuple[float, float, float]]:
    """(threshold, share of calls to strong, share of the gain recovered), from no call to all of them."""
    order = np.argsort(-scores, kind="stable")
    ranked, recovered = scores[order], np.cumsum(gain[order]) / gain.sum()
    ends = np.flatnonzero(np.append(ranked[:-1] != ranked[1:], True))  # a threshold takes equal scores together
    points = [(float(ranked[i]), (i + 1) / len(gain), float(recovered[i])) for i in ends]
    return [(1.0, 0.0, 0.0), *points]


def arm(x: npt.NDArray[np.float32], right: Floats, seed: int = 0) -> Trees:
    """Boosted trees for the chance that an arm is right. Raises RouteError where its outcomes are all alike."""
    try:
        from sklearn.ensemble import GradientBoostingClassifier
    except ImportError:
        raise RouteError("training needs scikit-learn; pip install 'slipstream-llm[route]'") from None
    if not 0 < right.sum() < len(right):
        raise RouteError("an arm that is always right, or never, teaches nothing; give outcomes of both kinds")
    fitted = GradientBoostingClassifier(
        n_estimators=120,
        learning_rate=0.05,
        max_leaf_nodes=10,
        min_samples_leaf=min(40, max(5, len(right) // 50)),
        subsample=0.5,
        max_features=0.3,
        random_state=seed,
    ).fit(x, right)
    trees = _exported(fitted, float(right.mean()))
    some = x[:200]
    if not np.allclose(trees.probability(some), fitted.predict_proba(some)[:, 1], atol=1e-9):
        raise RouteError("this scikit-learn lays its trees out in a way that is not known; use the pinned version")
    return trees


def _exported(fitted: GradientBoostingClassifier, prior: float) -> Trees:
    trees: list[Any] = [stage[0].tree_ for stage in fitted.estimators_]
    nodes = max(tree.node_count for tree in trees)

    def laid_out(of: str, dtype: Any) -> Any:
        out = np.zeros((len(trees), nodes), dtype)
        for row, tree in zip(out, trees, strict=True):
            row[: tree.node_count] = np.asarray(getattr(tree, of)).reshape(-1)
        return out

    leaf = laid_out("children_left", np.int32) < 0
    feature = np.where(leaf, -1, laid_out("feature", np.int32)).astype(np.int32)
    for row, tree in zip(feature, trees, strict=True):
        row[tree.node_count :] = -1
    return Trees(
        base=float(np.log(prior / (1 - prior))),
        feature=feature,
        cut=np.where(leaf, 0.0, laid_out("threshold", np.float64)),
        left=np.maximum(laid_out("children_left", np.int32), 0),
        right=np.maximum(laid_out("children_right", np.int32), 0),
        value=np.where(feature < 0, laid_out("value", np.float64), 0.0) * fitted.learning_rate,
        depth=max(tree.max_depth for tree in trees),
    )
