"""The learned policy on real outcomes: MMLU in 57 subjects and GSM8K, Mixtral-8x7B as fast, GPT-4 as strong.

python benchmarks/route_mmlu.py DATA [--write] [--plot FILE]

DATA holds `mmlu/*.csv` and `gsm8k_responses.csv` as published with RouteLLM (lm-sys/RouteLLM, Apache-2.0).

Split by question: half of the questions, by a hash of their text, train; the other half is asked once. Split by
subject: five folds of subjects, each judged by a model that saw none of its subjects. The deployed threshold is the
one that sends DEPLOYED of the training questions to strong (of held-out subjects, in the second split). Settings were
chosen on the training half of 38 subjects. In `high_school_mathematics` this data calls 3% of the strong model's
answers right, where one guess in four is: its answers were not understood when the data was made. Figures are also
given without it.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import numpy as np

from slipstream.bench.results import Row, line, write
from slipstream.route.evaluate import Judged, judge, share_for
from slipstream.route.learned import Model, features
from slipstream.route.outcomes import Table, read_outcomes, table
from slipstream.route.training import folds, train

STRONG, FAST = "gpt-4-1106-preview", "mistralai/Mixtral-8x7B-Instruct-v0.1"
DEPLOYED = 0.38  # share of calls to strong that is aimed at
ODD = "mmlu_high_school_mathematics"
RESULTS = Path(__file__).parent / "results"


def by_question(data: Table) -> tuple[Table, Table]:
    """(train, test), by a hash of the text: equal questions are never on both sides."""
    test = np.array([hashlib.sha256(text.encode()).digest()[-1] % 2 == 0 for text in data.texts])
    return data.take(~test), data.take(test)


def question_split(data: Table) -> tuple[Judged, Model, Table]:
    known, asked = by_question(data)
    model = train(known)
    scores = model.gain(asked.x)
    return judge(asked, scores, scores >= model.threshold_at(DEPLOYED), by_group=False), model, asked


def subject_split(data: Table) -> Judged:
    """Every subject is held out once. Thresholds come from subjects held out of training, inside each fold."""
    scores, decided = np.empty(len(data)), np.empty(len(data), bool)
    for fold in folds(data, by_group=True):
        model = train(data.take(~fold), by_group=True)
        scores[fold] = model.gain(data.x[fold])
        decided[fold] = scores[fold] >= model.threshold_at(DEPLOYED)
    return judge(data, scores, decided, by_group=True)


def words_instead(data: Table, *, by_group: bool) -> float:
    """The share for half of the gain with a classifier on words (TF-IDF, ridge) in place of form: for comparison."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline

    texts = np.array(data.texts, object)
    scores = np.empty(len(data))
    for fold in folds(data, by_group=by_group):
        words = TfidfVectorizer(sublinear_tf=True, min_df=2, ngram_range=(1, 2))
        scores[fold] = make_pipeline(words, Ridge(10)).fit(texts[~fold], data.gain[~fold]).predict(texts[fold])
    return share_for(0.5, scores, data.gain)


def told(name: str, found: Judged) -> None:
    print(
        f"{name}: {found.questions} questions, strong {found.strong_right:.1%}, fast {found.fast_right:.1%} right\n"
        f"  half of the gain at {found.share_for_half} of calls to strong; random 50%\n"
        f"  as deployed: {found.share} to strong recover {found.recovered}; "
        f"{found.right:.1%} right, random at that share {found.random_right:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/route_mmlu.json")
    parser.add_argument("--plot", type=Path, help="draw the curves of both splits")
    arguments = parser.parse_args()
    data = table(read_outcomes(arguments.data / "mmlu", STRONG, FAST))
    sound = data.take(data.groups != ODD)

    questions, model, asked = question_split(data)
    subjects = subject_split(data)
    told("MMLU, split by question", questions)
    told("MMLU, subjects held out", subjects)
    questions_sound, *_ = question_split(sound)
    subjects_sound = subject_split(sound)
    told("MMLU without high_school_mathematics, split by question", questions_sound)
    told("MMLU without high_school_mathematics, subjects held out", subjects_sound)
    words = {by: words_instead(data, by_group=by) for by in (False, True)}
    print(
        f"words (TF-IDF, ridge) instead of form: half at {words[False]:.1%} by question, {words[True]:.1%} by subject"
    )

    gsm = table(read_outcomes(arguments.data / "gsm8k_responses.csv", STRONG, FAST))
    gsm_scores = model.gain(gsm.x)
    carried = judge(gsm, gsm_scores, gsm_scores >= model.threshold_at(DEPLOYED), by_group=False)
    told("GSM8K, model trained on MMLU", carried)
    own, gsm_decided = np.empty(len(gsm)), np.empty(len(gsm), bool)
    for fold in folds(gsm, by_group=False):
        trained = train(gsm.take(~fold))
        own[fold] = trained.gain(gsm.x[fold])
        gsm_decided[fold] = own[fold] >= trained.threshold_at(DEPLOYED)
    learned = judge(gsm, own, gsm_decided, by_group=False)
    told("GSM8K, trained on GSM8K, five folds", learned)

    started = time.perf_counter()
    for text in asked.texts[:2000]:
        model.gain(features(text)[None])
    deciding_ms = (time.perf_counter() - started) / 2000 * 1e3
    print(f"deciding: {deciding_ms:.2f} ms a question")

    rows = [
        share_row("route-mmlu-strong-share", "calls to strong for half of its gain, MMLU, unseen questions", questions),
        recovered_row("route-mmlu-recovered", "gain recovered as deployed, MMLU, unseen questions", questions),
        share_row(
            "route-mmlu-strong-share-subjects", "calls to strong for half of its gain, MMLU, unseen subjects", subjects
        ),
        recovered_row("route-mmlu-recovered-subjects", "gain recovered as deployed, MMLU, unseen subjects", subjects),
        share_row(
            "route-mmlu-strong-share-sound",
            "calls to strong for half, MMLU but high_school_mathematics, unseen questions",
            questions_sound,
        ),
        share_row(
            "route-mmlu-strong-share-sound-subjects",
            "calls to strong for half, MMLU but high_school_mathematics, unseen subjects",
            subjects_sound,
        ),
        share_row("route-gsm8k-strong-share", "calls to strong for half of its gain, GSM8K, trained on GSM8K", learned),
        share_row(
            "route-gsm8k-strong-share-carried", "calls to strong for half of its gain, GSM8K, trained on MMLU", carried
        ),
        Row("route-deciding-ms", "features and trees of one question, one core", deciding_ms, "ms"),
    ]
    for row in rows:
        print(line(row))
    if arguments.write:
        write(RESULTS, "route_mmlu", rows, packages=["numpy", "scikit-learn"])
    if arguments.plot:
        from slipstream.route.plots import recovery

        recovery({"unseen questions": questions.curve, "unseen subjects": subjects.curve}, arguments.plot)


def share_row(id: str, work: str, found: Judged) -> Row:
    half = found.share_for_half
    return Row(
        id, f"{work} ({half.low:.1%} to {half.high:.1%})", half.value, "fraction", "random", 0.5, 0.5 / half.value
    )


def recovered_row(id: str, work: str, found: Judged) -> Row:
    share, got = found.share.value, found.recovered
    said = f"{work} with {share:.1%} of calls to strong ({got.low:.1%} to {got.high:.1%})"
    return Row(id, said, got.value, "fraction", "random", share, got.value / share)


if __name__ == "__main__":
    main()
