"""Router replay of the roles of a recipe whose models are mixtures of experts. No torch."""

from collections.abc import Mapping

from realrl.config.errors import UserError
from realrl.dataflow.graph import DataflowGraph
from realrl.dataflow.replay import add_router_replay, find_replaying_roles
from realrl.families.shape import ModelShape
from realrl.recipe.model import ModelConfig, trained_models


def replay_routers(
    graph: DataflowGraph, configs: Mapping[str, ModelConfig], shapes: Mapping[str, ModelShape]
) -> DataflowGraph:
    """Add router replay for the roles that are to have it; `shapes` are those that are known.

    UserError where a recipe asks for it in a role that has nothing to replay.
    """
    sampling, widths = find_replaying_roles(graph), {}
    for role, config in trained_models(configs).items():
        if role not in shapes:
            continue
        shape, field = shapes[role], f"models.{role}.router_replay={str(config.router_replay).lower()}"
        if shape.mixture is None:
            if config.router_replay is not None:
                raise UserError(
                    f"{field}: the model is no mixture of experts, and has no router; leave the setting out"
                )
        elif role in sampling:
            if config.router_replay is not False:
                widths[role] = shape.layers * shape.mixture.per_token
        elif config.router_replay:
            raise UserError(f"{field}: {role} is not trained on samples of its own; leave the setting out")
    return add_router_replay(graph, widths) if widths else graph
