#include "engine/optim/optimizer.h"

#include <algorithm>

#include "engine/optim/moments.h"

namespace pdl {
namespace {

struct Rule {
  const char* name;
  std::unique_ptr<Optimizer> (*make)(const OptimizerOptions&);
  double lr, epsilon, weight_decay;  ///< defaults
  bool adaptive;                     ///< has beta1, beta2 and epsilon; else momentum and nesterov
};

constexpr Rule kRules[] = {
    {"sgd", make_sgd, 1e-2, 1e-8, 0.0, false},
    {"adam", make_adam, 1e-3, 1e-8, 0.0, true},
    {"adamw", make_adam, 1e-3, 1e-8, 1e-2, true},
    {"lamb", make_lamb, 1e-3, 1e-6, 1e-2, true},
};

const Rule& rule_of(const std::string& name) {
  const auto* const rule =
      std::find_if(std::begin(kRules), std::end(kRules), [&](const Rule& r) { return name == r.name; });
  PDL_CHECK(rule != std::end(kRules), "no update rule is called ", name);
  return *rule;
}

double read_below_one(const ConfigReader& reader, const char* key, double fallback, const char* doc) {
  const double value = reader.get(key, fallback, doc, {0, 1});
  if (value < 1.0) return value;
  reader.problem(key, "must be below 1, got 1");
  return fallback;
}

/// Keys of the other kind of rule would not act, though whoever wrote them may believe that they do.
void refuse_foreign_keys(const ConfigReader& reader, const Rule& rule) {
  const auto refuse = [&](const char* key, const char* owner) {
    reader.problem(key, str("belongs to ", owner, "; ", rule.name, " has none"));
  };
  if (rule.adaptive) {
    if (reader.has("momentum")) {
      reader.get("momentum", 0.0, "sgd only");
      refuse("momentum", "sgd");
    }
    if (reader.has("nesterov")) {
      reader.get("nesterov", false, "sgd only");
      refuse("nesterov", "sgd");
    }
    return;
  }
  for (const char* key : {"beta1", "beta2", "epsilon"}) {
    if (!reader.has(key)) continue;
    reader.get(key, 0.0, "adam, adamw and lamb only");
    refuse(key, "adam, adamw and lamb");
  }
}

}  // namespace

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Rule& rule : kRules) all.push_back(rule.name);
    return all;
  }();
  return names;
}

OptimizerOptions read_optimizer_options(const ConfigReader& reader) {
  OptimizerOptions options;
  options.name = reader.choice("name", "sgd", optimizer_names(), "update rule; the other defaults here depend on it");
  const Rule& rule = rule_of(options.name);
  // Under a name that is no rule's, nobody can tell which keys are right.
  const bool name_is_known = reader.get<std::string>("name", "sgd", "") == options.name;
  if (!name_is_known) reader.leave_unjudged();
  options.lr = reader.get("lr", rule.lr, "learning rate, before the schedule", {0, 1e6});
  if (rule.adaptive) {
    options.beta1 = read_below_one(reader, "beta1", 0.9, "decay of the mean of gradients");
    options.beta2 = read_below_one(reader, "beta2", 0.999, "decay of the mean of squared gradients");
    options.epsilon = reader.get("epsilon", rule.epsilon, "added to the root of the second moment", {0, 1});
    if (options.epsilon == 0.0) {
      reader.problem("epsilon", "must be above 0: a weight that never had a gradient would become NaN");
    }
  } else {
    options.momentum =
        read_below_one(reader, "momentum", 0.0, "share of the last step that is kept; 0: no momentum buffer");
    options.nesterov = reader.get("nesterov", false, "look ahead along the momentum");
    if (options.nesterov && options.momentum == 0.0) reader.problem("nesterov", "needs a momentum above 0");
  }
  if (name_is_known) refuse_foreign_keys(reader, rule);
  options.weight_decay = reader.get("weight_decay", rule.weight_decay,
                                    "L2 decay, of all parameters unless decay_biases_and_norms is false", {0, 1e6});
  options.decay_biases_and_norms = reader.get("decay_biases_and_norms", options.decay_biases_and_norms,
                                              "weight decay also on biases and norms, as PyTorch's optimizers do");
  options.clip_grad_norm =
      reader.get("clip_grad_norm", 0.0, "largest norm of all gradients together; 0: no clipping", {0, 1e12});
  return options;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options) {
  return rule_of(options.name).make(options);
}

std::int64_t optimizer_bytes(const OptimizerOptions& options, std::int64_t elements, DType dtype,
                             std::int64_t segments) {
  const std::int64_t moments = make_optimizer(options)->moments() * elements * size_of(wide_dtype(dtype));
  const std::int64_t norms = options.name == "lamb" ? 2 * segments * size_of(DType::fp64) : 0;
  return moments + norms;
}

double clip_scale(double norm, double max_norm) {
  if (max_norm == 0.0) return 1.0;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

}  // namespace pdl
