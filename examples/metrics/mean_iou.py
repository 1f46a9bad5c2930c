"""Mean intersection over union for `evaluate`, as a file: loading a metric by name asks the network."""

import datasets
import evaluate
import numpy as np


class MeanIou(evaluate.Metric):
    """The share of the pixels of a class, predicted or true, that are both; the mean over classes."""

    def _info(self) -> evaluate.MetricInfo:
        maps = datasets.Sequence(datasets.Sequence(datasets.Value("int32")))
        return evaluate.MetricInfo(
            description="Mean over classes of intersection over union, summed over all pixels of all images, 0 to 1.",
            citation="",
            inputs_description=(
                "predictions and references: class numbers (height, width), one array an image; `num_labels`; "
                "`ignore_index`: pixels with this reference are left out"
            ),
            features=datasets.Features({"predictions": maps, "references": maps}),
        )

    def _compute(
        self,
        predictions: list[list[list[int]]],
        references: list[list[list[int]]],
        num_labels: int,
        ignore_index: int = 255,
    ) -> dict[str, object]:
        counts = np.zeros((num_labels, num_labels), dtype=np.int64)  # by reference and prediction
        for predicted, true in zip(predictions, references, strict=True):
            p, t = np.asarray(predicted).ravel(), np.asarray(true).ravel()
            known = t != ignore_index
            counts += np.bincount(t[known] * num_labels + p[known], minlength=num_labels**2).reshape(counts.shape)
        both = counts.diagonal()
        either = counts.sum(axis=0) + counts.sum(axis=1) - both
        with np.errstate(invalid="ignore"):
            iou = both / either
        # A class that is neither in the references nor predicted has none.
        return {"mean_iou": float(np.nanmean(iou)), "iou": iou.tolist(), "accuracy": float(both.sum() / counts.sum())}
