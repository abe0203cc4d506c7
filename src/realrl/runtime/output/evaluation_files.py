"""Files of an evaluation alone."""

import json
from pathlib import Path

from realrl.config.errors import RunError
from realrl.config.files import reason_of, write_whole
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment
from realrl.runtime.evaluation.answers import EvaluationReport
from realrl.runtime.output.rows import replace_infinite, write_rows

METRICS_FILE, SAMPLES_FILE = "metrics.json", "samples.jsonl"


def write_evaluation(directory: Path, experiment: Experiment, report: EvaluationReport) -> list[Path]:
    """Write the metrics of an evaluation, and the answers if there are any, in place of those of an earlier one.

    Returns the files. RunError where they cannot be written.
    """
    roles = get_spec(experiment).roles_of(experiment)
    content = {
        "algorithm": get_spec(experiment).name,
        "models": {role: getattr(experiment.models, role).path for role in roles},
        "data": experiment.data.eval,
        "records": len(report.origins),
        "evaluation": experiment.evaluation.model_dump(mode="json"),
        "seconds": round(report.seconds, 3),
        "metrics": replace_infinite(report.result.metrics),
    }
    metrics, samples = directory / METRICS_FILE, directory / SAMPLES_FILE
    try:
        # Before the metrics, which tell that all is there.
        if report.result.rows:
            write_rows(samples, report.result.rows)
        else:
            samples.unlink(missing_ok=True)
        write_whole(metrics, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{directory} cannot be written: {reason_of(error)}") from error
    return [metrics, samples] if report.result.rows else [metrics]
