#include "parallel/sync/gather_schedule.h"

#include <algorithm>
#include <set>

#include "tests/parallel/sync/model_stores.h"
#include "tests/support/catch.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

/// Forward and back over layers, each with a block of its own.
std::vector<LayerUse> there_and_back(const std::vector<std::int64_t>& elements) {
  std::vector<LayerUse> uses;
  const int layers = static_cast<int>(elements.size());
  for (int i = 0; i < layers; ++i) uses.push_back({i, {i}, elements[static_cast<std::size_t>(i)]});
  for (int i = layers - 1; i >= 0; --i) uses.push_back(uses[static_cast<std::size_t>(i)]);
  return uses;
}

/// What any schedule must do: a block is there when it is needed, is gathered once at a time, and shares its memory
/// with nothing that is there at the same time.
void check_schedule(const std::vector<LayerUse>& uses, const std::vector<std::int64_t>& elements,
                    const GatherSchedule& schedule) {
  std::set<int> held;
  for (std::size_t u = 0; u < uses.size(); ++u) {
    const GatherSchedule::Use& use = schedule.uses[u];
    for (const std::vector<int>* begun : {&use.gathered, &use.ahead}) {
      for (int gather : *begun) {
        const Gather& fresh = schedule.gathers[static_cast<std::size_t>(gather)];
        CHECK(fresh.first_use == u);
        for (int other : held) {
          const Gather& there = schedule.gathers[static_cast<std::size_t>(other)];
          const auto size = [&](const Gather& g) { return elements[static_cast<std::size_t>(g.block)]; };
          CHECK(there.block != fresh.block);
          CHECK((there.offset + size(there) <= fresh.offset || fresh.offset + size(fresh) <= there.offset));
        }
        held.insert(gather);
      }
    }
    std::vector<int> needed;
    for (int gather : use.needed) {
      CHECK(held.count(gather) == 1);
      needed.push_back(schedule.gathers[static_cast<std::size_t>(gather)].block);
    }
    CHECK(needed == uses[u].blocks);
    std::int64_t live = 0;
    for (int gather : held) {
      const Gather& there = schedule.gathers[static_cast<std::size_t>(gather)];
      live += elements[static_cast<std::size_t>(there.block)];
      CHECK(there.offset + elements[static_cast<std::size_t>(there.block)] <= schedule.memory_elements);
    }
    CHECK(use.live_elements == live);
    for (int gather : use.released) {
      CHECK(schedule.gathers[static_cast<std::size_t>(gather)].last_use == u);
      CHECK(held.erase(gather) == 1);
    }
  }
  CHECK(held.empty());
  CHECK(schedule.memory_elements >= schedule.most_live_elements());
}

/// A model's uses and block sizes as stage 3 has them on one rank's worth of padding, small parameters being resident.
struct ModelUses {
  ModelUses(const ModelStore& model, std::int64_t resident_elements) {
    const ShardMap map(model.store, layer_blocks(model.store, model.users, resident_elements), 1, 1);
    for (const ShardBlock& block : map.blocks()) elements.push_back(block.elements);
    std::vector<LayerUse> layers(model.layers.size());
    for (std::size_t i = 0; i < model.users.size(); ++i) {
      const bool resident = model.store.params()[i].count <= resident_elements;
      for (int layer : model.users[i]) {
        LayerUse& use = layers[static_cast<std::size_t>(layer)];
        const int block = map.block_of(static_cast<int>(i));
        use.layer = layer;
        use.elements += model.store.params()[i].count;
        if (!resident && std::find(use.blocks.begin(), use.blocks.end(), block) == use.blocks.end()) {
          use.blocks.push_back(block);
        }
      }
    }
    std::erase_if(layers, [](const LayerUse& use) { return use.elements == 0; });
    uses = layers;
    uses.insert(uses.end(), layers.rbegin(), layers.rend());
  }

  /// Elements that are gathered at some time and not held between the last forward and the first backward use.
  std::int64_t let_go_at_the_turn(const GatherSchedule& schedule) const {
    std::set<int> away;
    for (const Gather& gather : schedule.gathers) away.insert(gather.block);
    for (const Gather& gather : schedule.gathers) {
      if (gather.first_use < uses.size() / 2 && gather.last_use >= uses.size() / 2) away.erase(gather.block);
    }
    std::int64_t sum = 0;
    for (int block : away) sum += elements[static_cast<std::size_t>(block)];
    return sum;
  }

  std::vector<LayerUse> uses;
  std::vector<std::int64_t> elements;
};

std::vector<std::vector<int>> blocks_of(const GatherSchedule& schedule, std::vector<int> GatherSchedule::Use::*list) {
  std::vector<std::vector<int>> blocks;
  for (const GatherSchedule::Use& use : schedule.uses) {
    blocks.emplace_back();
    for (int gather : use.*list) blocks.back().push_back(schedule.gathers[static_cast<std::size_t>(gather)].block);
  }
  return blocks;
}

using Blocks = std::vector<std::vector<int>>;

}  // namespace

TEST_CASE("without looking ahead every use gathers and lets go") {
  const std::vector<std::int64_t> elements = {10, 20, 30};
  const GatherSchedule schedule =
      plan_gathers(there_and_back(elements), elements, {.prefetch_elements = 0, .max_live_elements = 1000});
  check_schedule(there_and_back(elements), elements, schedule);
  CHECK(blocks_of(schedule, &GatherSchedule::Use::gathered) == Blocks{{0}, {1}, {2}, {2}, {1}, {0}});
  CHECK(blocks_of(schedule, &GatherSchedule::Use::released) == Blocks{{0}, {1}, {2}, {2}, {1}, {0}});
  CHECK(schedule.memory_elements == 30);
}

TEST_CASE("one ahead: the next block is on its way, and the one at the turn stays") {
  const std::vector<std::int64_t> elements = {10, 20, 30};
  const GatherSchedule schedule =
      plan_gathers(there_and_back(elements), elements, {.prefetch_elements = 1, .max_live_elements = 1000});
  check_schedule(there_and_back(elements), elements, schedule);
  CHECK(blocks_of(schedule, &GatherSchedule::Use::gathered) == Blocks{{0}, {}, {}, {}, {}, {}});
  CHECK(blocks_of(schedule, &GatherSchedule::Use::ahead) == Blocks{{1}, {2}, {}, {1}, {0}, {}});
  CHECK(blocks_of(schedule, &GatherSchedule::Use::released) == Blocks{{0}, {1}, {}, {2}, {1}, {0}});
  CHECK(schedule.most_live_elements() == 50);
}

TEST_CASE("upstream's looking ahead skips what is there, and so runs further ahead behind the turn") {
  const std::vector<std::int64_t> elements = {10, 20, 30};
  const GatherSchedule schedule =
      plan_gathers(there_and_back(elements), elements,
                   {.prefetch_elements = 1, .max_live_elements = 1000, .held_blocks_count = false});
  check_schedule(there_and_back(elements), elements, schedule);
  CHECK(blocks_of(schedule, &GatherSchedule::Use::ahead) == Blocks{{1}, {2}, {1}, {0}, {}, {}});
  CHECK(schedule.most_live_elements() == 60);
}

TEST_CASE("the bound on live elements stops looking ahead, never a use") {
  const std::vector<std::int64_t> elements = {10, 20, 30, 5};
  const GatherSchedule schedule =
      plan_gathers(there_and_back(elements), elements, {.prefetch_elements = 1000, .max_live_elements = 20});
  check_schedule(there_and_back(elements), elements, schedule);
  CHECK(schedule.uses[0].ahead.size() == 1);  // 10 are there, 20 more are begun, and that is more than enough
  CHECK(schedule.uses[1].ahead.empty());
  CHECK(blocks_of(schedule, &GatherSchedule::Use::gathered)[2] == std::vector<int>{2});
}

TEST_CASE("any settings give a schedule that holds together") {
  const ModelStore gpt2(R"({"model": "gpt2-tiny"})", 300), vgg = vgg16();
  for (const ModelStore* model : {&gpt2, &vgg}) {
    for (std::int64_t resident : {0, 100, 100000}) {
      const ModelUses of(*model, resident);
      for (std::int64_t prefetch : {0, 1, 30000, 500000000}) {
        for (std::int64_t reuse : {0, 20000, 40000000, 1000000000}) {
          for (std::int64_t live : {1, 50000, 1000000000}) {
            INFO(resident << " " << prefetch << " " << reuse << " " << live);
            for (bool held_blocks_count : {false, true}) {
              check_schedule(of.uses, of.elements,
                             plan_gathers(of.uses, of.elements, {prefetch, live, reuse, held_blocks_count}));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("what is let go between forward and backward pass, as found for upstream's rules") {
  const ModelUses vgg(vgg16(), 100000), gpt2(gpt2_medium(), 100000);
  const auto let_go = [](const ModelUses& of, std::int64_t prefetch, std::int64_t reuse) {
    return of.let_go_at_the_turn(plan_gathers(of.uses, of.elements, {prefetch, 1000000000, reuse, false}));
  };
  const auto millions = [](std::int64_t elements) { return (elements + 500000) / 1000000; };
  for (std::int64_t prefetch : {0, 50000000}) {
    CHECK(let_go(vgg, prefetch, 1000000000) == 0);
    CHECK(let_go(gpt2, prefetch, 1000000000) == 0);
  }
  CHECK(millions(let_go(vgg, 0, 100000000)) == 15);
  CHECK(millions(let_go(gpt2, 0, 100000000)) == 303);
  // With the default of looking ahead the rule counts on all that is held, and then nothing is let go at all.
  CHECK(let_go(vgg, 50000000, 100000000) == 0);
  CHECK(let_go(gpt2, 50000000, 100000000) == 0);
}

TEST_CASE("memory of things that live at different times is shared") {
  const std::vector<std::int64_t> elements = {100, 100, 100, 100, 100, 100};
  const GatherSchedule schedule =
      plan_gathers(there_and_back(elements), elements, {.prefetch_elements = 1, .max_live_elements = 10000});
  CHECK(schedule.memory_elements == 200);
}
