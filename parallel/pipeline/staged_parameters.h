#pragma once
// All parameters of a model whose stages lie on different ranks, one after the other, whole, on world rank 0. A
// parameter may be divided further: into slices over tensor-parallel ranks, and these over replicas.

#include <functional>
#include <vector>

#include "parallel/pipeline/pipeline_plan.h"

namespace pdl {

/// What a rank knows of a parameter's weights: elements [first, first + values.elements()) of a slice.
struct HeldPart {
  ParamSlice slice = {};
  std::int64_t first = 0;
  Tensor values;  ///< in device memory, of the wide type; undefined when it knows none
};

class StagedParameters {
 public:
  /// Plans only.
  StagedParameters(const EngineContext& context, const PipelinePlan& plan) : context_(context), plan_(plan) {}

  void prepare();
  std::int64_t predicted_bytes() const;  ///< that `prepare` takes on this rank, for communication

  /// Calls `visit` on rank 0 as Engine::visit_parameters does. Parameters are counted as in the dense model.
  /// `holders(i)`: the world ranks whose parts make parameter i, the same on every rank; `held(i)` is asked on these.
  /// Other ranks' parts come to rank 0 through a buffer of plan.visit_elements(). Collective.
  void visit(const std::function<std::vector<int>(int dense_index)>& holders,
             const std::function<HeldPart(int dense_index)>& held, const Engine::ParameterVisitor& visit);

 private:
  /// A HeldPart as it is announced to rank 0.
  struct Account {
    std::int64_t axis = -1, begin = 0, count = 0, groups = 1;
    std::int64_t first = 0, elements = 0;
  };
  Tensor words() const { return account_.tensor(DType::int64, Shape{sizeof(Account) / sizeof(std::int64_t)}); }
  void send(const HeldPart& part);
  void take(int holder, const HeldPart& own, const ParamSpec& dense, const Tensor& whole);

  const EngineContext& context_;
  const PipelinePlan& plan_;
  Buffer landing_;  ///< rank 0: parts of other ranks' parameters
  Buffer account_;
  std::vector<char> piece_;  ///< of `take`
};

/// A parameter's range in a flat one of a store's layout, by its name; undefined when the store does not have it.
Tensor range_of(const ParamStore& store, const Tensor& flat, const std::string& name);

}  // namespace pdl
