// The knobs of the megatron engine: reading them, and checking them against ranks, model and recipe.

#include <algorithm>
#include <functional>

#include "parallel/engines/megatron.h"
#include "parallel/pipeline/stage_feeder.h"

namespace pdl {
namespace {

void read_recomputation(const ConfigReader& reader, MegatronKnobs& knobs) {
  knobs.granularity =
      reader.choice("recompute_granularity", knobs.granularity, {"none", "selective", "full"},
                    "activations that the backward pass computes again to save memory. selective: attention's scores, "
                    "which no setting here keeps; full: all of a transformer block but its input");
  knobs.method = reader.choice("recompute_method", knobs.method, {"uniform", "block"},
                               "recompute_granularity=full. uniform: all blocks, in groups of recompute_num_layers of "
                               "which the input is kept; block: the first recompute_num_layers of each stage");
  knobs.recomputed_blocks =
      reader.get("recompute_num_layers", knobs.recomputed_blocks,
                 "recompute_granularity=full: transformer blocks of a group, or of a stage", {1, 1 << 20});
}

}  // namespace

MegatronKnobs read_megatron_knobs(const ConfigReader& reader) {
  MegatronKnobs knobs;
  knobs.preset = reader.choice("preset", knobs.preset, {"none", "megatron-intra", "megatron-data"},
                               "series of the study: all ranks divide layers, or all ranks divide samples");
  const int everything = knobs.preset == "megatron-intra" ? 0 : 1;
  knobs.tp = reader.get("tensor_model_parallel_size", everything, "ranks that divide each layer; 0: all", {0, 1 << 20});
  knobs.pp = reader.get("pipeline_model_parallel_size", knobs.pp, "stages of the pipeline", {1, 1 << 20});
  knobs.chunks = reader.get("virtual_pipeline_model_parallel_size", knobs.chunks,
                            "stages on each rank, interleaved: a smaller bubble, more messages", {1, 1 << 20});
  knobs.group = reader.get("microbatch_group_size_per_vp_stage", knobs.group,
                           "interleaved: micro-batches that go through one stage of a rank before the next one's turn; "
                           "0: as many as ranks in the pipeline",
                           {0, 1 << 20});
  knobs.sequence_parallel = reader.get("sequence_parallel", knobs.sequence_parallel,
                                       "outside divided layers each tensor-parallel rank has a part of the sequence");
  knobs.distributed_optimizer = reader.get("use_distributed_optimizer", knobs.distributed_optimizer,
                                           "optimizer states divided over data-parallel ranks");
  knobs.overlap_grad_reduce = reader.get("overlap_grad_reduce", knobs.overlap_grad_reduce,
                                         "reduce gradients over data-parallel ranks under the last backward pass");
  knobs.bucket_size = reader.get<std::int64_t>(
      "ddp_bucket_size", knobs.bucket_size,
      "elements of a gradient bucket; 0: max(40e6, 1e6 dp) with overlap_grad_reduce, else one bucket", {0, 1e15});
  knobs.tp_pp_dp = reader.get("use_tp_pp_dp_mapping", knobs.tp_pp_dp,
                              "neighbouring ranks are stages (tp-pp-dp) instead of replicas (tp-dp-pp)");
  read_recomputation(reader, knobs);
  return knobs;
}

int MegatronKnobs::tensor_ranks(int ranks) const { return tp == 0 ? std::max(1, ranks / pp) : tp; }

ProcessGrid MegatronKnobs::grid(int ranks) const {
  const int divided = tensor_ranks(ranks);
  return ProcessGrid({.tp = divided, .dp = ranks / (divided * pp), .pp = pp}, tp_pp_dp ? "tp-pp-dp" : "tp-dp-pp");
}

Recomputation MegatronKnobs::recomputation() const {
  using Method = Recomputation::Method;
  if (granularity != "full") return {};
  return {.method = method == "block" ? Method::block : Method::uniform, .blocks = recomputed_blocks};
}

int legal_group(int stages, int micro_batches, int wanted) {
  for (int group = std::max(stages, wanted == 0 ? stages : wanted); group < micro_batches; ++group) {
    const int rest = micro_batches % group;
    if (rest == 0 || rest >= stages) return group;
  }
  return micro_batches;
}

int micro_batches_of(const EngineContext& context, int dp) {
  const std::int64_t share = context.training.global_batch / dp, micro_batch = context.training.micro_batch;
  return static_cast<int>(micro_batch > 0 ? (share + micro_batch - 1) / micro_batch : 1);
}

std::vector<LayerCost> megatron_costs(const EngineContext& context, int dp) {
  const std::int64_t samples = cut_step(context.training.global_batch / dp, micro_batches_of(context, dp))[0].count;
  return layer_costs(context.model.build(LayerFactory()), context.model.sample_input, context.training.dtype, samples);
}

PartitionReport cut_evenly(const std::vector<LayerCost>& costs, int stages) {
  PartitionReport report{.balance = {}, .criterion = {}, .criterion_name = "operations", .method = "minimax"};
  for (const LayerCost& cost : costs) report.criterion.push_back(cost.time());
  report.balance = minimax_balance(report.criterion, stages);
  return report;
}

namespace {

/// The numbers next to `wanted` that are legal, from 1 to `most`, as words.
std::string nearest(int wanted, int most, const std::function<bool(int)>& is_legal) {
  int below = std::min(wanted, most), above = wanted;
  while (below > 1 && !is_legal(below)) --below;
  while (above <= most && !is_legal(above)) ++above;
  return below == above || above > most ? str(below) : str(below, " or ", above);
}

int layers_to_divide(const EngineContext& context) {
  return static_cast<int>(context.model.build(LayerFactory()).size()) - 1;
}

/// Notes stages that the ranks or the layers do not fill.
bool check_stages(const EngineContext& context, const MegatronKnobs& knobs, const ConfigReader& reader) {
  const int ranks = context.world.size(), layers = layers_to_divide(context);
  std::string problem;
  if (ranks % knobs.pp != 0) {
    problem = str(knobs.pp, " stages do not divide ", ranks, " ranks");
  } else if (knobs.pp > layers) {
    problem = str(knobs.pp, " stages, but the model has only ", layers, " layers to divide");
  }
  if (problem.empty()) return true;
  // Best is a number that goes with the tensor-parallel ranks that are asked for.
  const int rest = knobs.tp > 0 && ranks % knobs.tp == 0 ? ranks / knobs.tp : ranks;
  reader.problem("pipeline_model_parallel_size",
                 str(problem, "; nearest: ", nearest(knobs.pp, std::min(ranks, layers), [rest](int stages) {
                       return rest % stages == 0;
                     })));
  return false;
}

/// Notes layers or sequences that so many ranks cannot divide. The stages fit.
bool check_tensor_ranks(const EngineContext& context, const MegatronKnobs& knobs, const ConfigReader& reader) {
  const int ranks = context.world.size(), tp = knobs.tensor_ranks(ranks);
  const auto check = [&](const char* key, SpreadOver spread) {
    const std::string obstacle = obstacle_to_tensor_parallel(context.model, spread, tp, ranks / knobs.pp);
    if (obstacle.empty()) return true;
    reader.problem(key, str("over ", tp, " ranks: ", obstacle));
    return false;
  };
  return check("tensor_model_parallel_size", SpreadOver::none) && check("sequence_parallel", knobs.spread(ranks));
}

/// The largest micro-batch size that cuts so many samples into as many micro-batches as stages, as the end of advice.
std::string smaller_micro_batch(std::int64_t samples, int stages) {
  std::int64_t size = samples / stages;
  while (size > 1 && samples % size != 0) --size;
  return size > 0 ? str(", or training.micro_batch_size=", size) : "";
}

/// Notes what cannot be interleaved.
bool check_chunks(const EngineContext& context, const MegatronKnobs& knobs, const ConfigReader& reader) {
  const int dp = knobs.grid(context.world.size()).size().dp;
  const int micro_batches = micro_batches_of(context, dp), layers = layers_to_divide(context);
  bool is_fine = true;
  const auto problem = [&](const char* key, const std::string& message) {
    reader.problem(key, message);
    is_fine = false;
  };
  if (knobs.pp > 1 && knobs.pp * knobs.chunks > layers) {
    problem("virtual_pipeline_model_parallel_size", str(knobs.pp * knobs.chunks, " stages, but the model has only ",
                                                        layers, " layers to divide; at most ", layers / knobs.pp));
  }
  if (knobs.chunks == 1) {
    if (knobs.group > 0) {
      problem("microbatch_group_size_per_vp_stage", "acts with virtual_pipeline_model_parallel_size above 1 only");
    }
    return is_fine;
  }
  if (knobs.pp == 1) {
    problem("virtual_pipeline_model_parallel_size",
            "needs several stages: set pipeline_model_parallel_size to 2 or more, or this to 1");
  } else if (micro_batches < knobs.pp) {
    problem("virtual_pipeline_model_parallel_size",
            str("needs as many micro-batches as stages, there are ", micro_batches, " for ", knobs.pp, "; take 1",
                smaller_micro_batch(context.training.global_batch / dp, knobs.pp)));
  } else {
    const int wanted = knobs.group == 0 ? knobs.pp : knobs.group, legal = legal_group(knobs.pp, micro_batches, wanted);
    if (wanted != legal) {
      problem("microbatch_group_size_per_vp_stage",
              str(micro_batches, " micro-batches cannot go in groups of ", wanted, ": the last group needs ", knobs.pp,
                  " at least; nearest: ", legal));
    }
  }
  return is_fine;
}

/// Notes what cannot be recomputed. The grid and the chunks are legal.
bool check_recomputation(const EngineContext& context, const MegatronKnobs& knobs, const ConfigReader& reader) {
  bool is_fine = true;
  const auto problem = [&](const char* key, const std::string& message) {
    reader.problem(key, message);
    is_fine = false;
  };
  if (knobs.granularity != "full") {
    for (const char* key : {"recompute_method", "recompute_num_layers"}) {
      if (reader.has(key)) problem(key, str("acts with recompute_granularity=full only, this is ", knobs.granularity));
    }
  }
  if (knobs.granularity == "none") return is_fine;
  const LayerList layers = context.model.build(LayerFactory());
  if (count_blocks(layers, 0, static_cast<int>(layers.size())) == 0) {
    problem("recompute_granularity", str(context.model.name, " has no transformer blocks to recompute; nearest: none"));
    return is_fine;
  }
  const int dp = knobs.grid(context.world.size()).size().dp;
  const PartitionReport report = cut_evenly(megatron_costs(context, dp), knobs.pp * knobs.chunks);
  const std::vector<int> begins = stage_begins(report.balance);
  int most = 0;
  for (std::size_t stage = 0; stage + 1 < begins.size(); ++stage) {
    most = std::max(most, count_blocks(layers, begins[stage], begins[stage + 1]));
  }
  if (knobs.granularity == "full" && knobs.recomputed_blocks > most) {
    problem("recompute_num_layers", str(knobs.recomputed_blocks, " transformer blocks, but no stage has more than ",
                                        most, "; nearest: ", most));
  }
  return is_fine;
}

}  // namespace

bool check_megatron(const EngineContext& context, const MegatronKnobs& knobs, const ConfigReader& reader) {
  if (!check_stages(context, knobs, reader) || !check_tensor_ranks(context, knobs, reader)) return false;
  if (!check_chunks(context, knobs, reader)) return false;
  return check_recomputation(context, knobs, reader);
}

PlanTable legal_grids(const EngineContext& context) {
  const int ranks = context.world.size(), layers = layers_to_divide(context);
  PlanTable table{
      .title = str("what is legal for ", context.model.name, " on ", ranks, " ranks: ", layers, " layers to divide"),
      .columns = {"pp", "tp", "tp with sequence_parallel", "interleaved stages on a rank"},
      .rows = {}};
  for (int pp = 1; pp <= std::min(ranks, layers); ++pp) {
    if (ranks % pp != 0) continue;
    const auto legal = [&](SpreadOver spread) {
      std::string numbers;
      for (int tp = 1; tp <= ranks / pp; ++tp) {
        if (!obstacle_to_tensor_parallel(context.model, spread, tp, ranks / pp).empty()) continue;
        numbers += str(numbers.empty() ? "" : ", ", tp);
      }
      return numbers;
    };
    const int most = pp == 1 ? 1 : layers / pp;
    table.rows.push_back({str(pp), legal(SpreadOver::none), legal(SpreadOver::sequence),
                          most == 1 ? "1" : str("1 to ", most, ", from ", pp, " micro-batches on")});
  }
  return table;
}

}  // namespace pdl
