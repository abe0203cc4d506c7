"""MLflow."""

import logging
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from realrl.config.secrets.redaction import redact_settings
from realrl.recipe.sections.trackers import MlflowConfig
from realrl.runtime.output.trackers.tracker import TrackedRun

NAME = "mlflow"
_PARAMETERS, _VALUE, _NOTES = 100, 500, 5000
"""Most parameters in a request, characters of a value, and of the notes, that all servers accept."""


class MlflowTracker:
    """A run of MLflow."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._id = ""
        self._notes: list[str] = []
        self._parameters: list[tuple[str, str]] = []
        """Settings of a new run that have not been sent yet."""

    def open(self, run: TrackedRun) -> None:
        """Begin a run, or go on with that of an earlier process."""
        from mlflow import MlflowClient

        # It tells of each change of its tables.
        logging.getLogger(NAME).setLevel(logging.WARNING)
        self._client = MlflowClient(tracking_uri=self._config.tracking_uri)
        self._notes = list(run.notes)  # a further one replaces them all
        known = run.load_id(NAME)
        if known is not None and self._is_there(known):
            self._id = known
            self._client.update_run(known, status="RUNNING")
        else:
            self._id = self._create(run)
            self._parameters = list(_flatten(run.settings))
            run.save_id(NAME, self._id)
        self._send_parameters()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(_rename(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=found)

    def note(self, text: str) -> None:
        """Add a line to the description of the run."""
        self._notes.append(text)
        self._client.set_tag(self._id, "mlflow.note.content", "\n\n".join(self._notes)[-_NOTES:])

    def close(self, *, done: bool) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._id, "FINISHED" if done else "FAILED")

    def _is_there(self, name: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_run(name)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # another server, or deleted there
                return False
            raise
        return True

    def _create(self, run: TrackedRun) -> str:
        config, client = self._config, self._client
        experiment = client.get_experiment_by_name(config.experiment)
        where = (
            client.create_experiment(config.experiment) if experiment is None else experiment.experiment_id
        )
        tags = redact_settings(config.tags)
        made = client.create_run(where, run_name=config.run_name or run.name, tags=tags)
        name: str = made.info.run_id
        return name

    def _send_parameters(self) -> None:
        """Send settings; those that are not taken are sent when the run is opened again."""
        from mlflow.entities import Param

        while self._parameters:
            some = [Param(key, value[:_VALUE]) for key, value in self._parameters[:_PARAMETERS]]
            self._client.log_batch(self._id, params=some)
            del self._parameters[:_PARAMETERS]


def _rename(name: str) -> str:
    """Replace what names there cannot have, as in `pass@8`."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """List settings that are given, by their dotted names."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{_rename(str(key))}.")
        elif value is not None:
            yield prefix + _rename(str(key)), str(value)
