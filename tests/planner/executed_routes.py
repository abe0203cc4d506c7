"""Reallocation time of the routes that a run executes, to compare with the planner's estimate."""

from realrl.layout.layout import build_layout
from realrl.layout.routing.routes import reallocate
from realrl.layout.sets import BASE, element_width
from realrl.plan.placement import Placement
from realrl.planner.cost.cost_model import CostModel, find_slowest
from realrl.program.memory import StoredModel


def time_routes(costs: CostModel, model: StoredModel, source: Placement, target: Placement) -> float:
    tensors, cluster = model.sets[BASE].tensors, costs.spec.cluster
    layouts = [build_layout(model.shape, model.head, place, tensors) for place in (source, target)]
    meshes = source.mesh, target.mesh
    nodes = {cluster.node(rank) for mesh in meshes for rank in range(mesh.first, mesh.first + mesh.size)}
    links = find_slowest(costs.node_links[node] for node in nodes)
    width = min(model.width(place.strategy) for place in (source, target))
    return reallocate(*layouts, cluster, links).seconds(links, element_width(BASE, width))
