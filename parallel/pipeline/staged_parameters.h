#pragma once
// All parameters of a model whose stages lie on different ranks, one after the other, on rank 0.

#include <functional>

#include "parallel/pipeline/pipeline_plan.h"

namespace pdl {

/// Calls `visit` on rank 0 as Engine::visit_parameters does. `held(i)` gives the weights of parameter i of the dense
/// model, on the rank that owns it. Other ranks' parameters come to rank 0 in parts, through `landing`, which has
/// plan.visit_elements(). Collective.
void visit_staged_parameters(const EngineContext& context, const PipelinePlan& plan, const Buffer& landing,
                             const std::function<Tensor(int dense_index)>& held, const Engine::ParameterVisitor& visit);

/// A parameter's range in a flat one of a store's layout, by its name; undefined when the store does not have it.
Tensor range_of(const ParamStore& store, const Tensor& flat, const std::string& name);

}  // namespace pdl
