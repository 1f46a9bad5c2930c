"""Accuracy for `evaluate`, as a file: loading a metric by name asks the network."""

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """The share of predictions that equal their reference."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The share of predictions that equal their reference, 0 to 1.",
            citation="",
            inputs_description="predictions and references: class numbers",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
