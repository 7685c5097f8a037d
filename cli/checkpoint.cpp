#include "cli/checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/record/durable_file.h"

namespace pdl {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::int64_t kChunkBytes = 16 << 20;

std::uint64_t fnv1a(std::uint64_t hash, const char* data, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<unsigned char>(data[i])) * 1099511628211ull;
  return hash;
}
constexpr std::uint64_t kFnvStart = 1469598103934665603ull;

std::string rank_file(int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "rank-%05d.bin", rank);
  return name;
}

/// Writes the tensors end to end; returns {bytes, checksum} as the manifest holds them.
Json write_state(Device& device, Engine& engine, const std::string& path) {
  AppendFile file(path);
  Stream& stream = device.compute_stream();
  std::vector<char> chunk(static_cast<std::size_t>(kChunkBytes));
  std::int64_t total = 0;
  std::uint64_t hash = kFnvStart;
  for (const StateTensor& state : engine.state()) {
    for (std::int64_t begin = 0; begin < state.tensor.bytes(); begin += kChunkBytes) {
      const std::int64_t bytes = std::min(kChunkBytes, state.tensor.bytes() - begin);
      device.copy(chunk.data(), static_cast<const char*>(state.tensor.raw()) + begin, bytes, stream);
      stream.synchronize();
      file.append({chunk.data(), static_cast<std::size_t>(bytes)});
      hash = fnv1a(hash, chunk.data(), bytes);
      total += bytes;
    }
  }
  file.sync();
  return {{"bytes", total}, {"checksum", hash}};
}

void read_state(Device& device, Engine& engine, const std::string& path, const Json& expected) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("checkpoint file " + path + " cannot be opened", ExitCode::data);
  Stream& stream = device.compute_stream();
  std::vector<char> chunk(static_cast<std::size_t>(kChunkBytes));
  std::uint64_t hash = kFnvStart;
  std::int64_t total = 0;
  for (const StateTensor& state : engine.state()) {
    for (std::int64_t begin = 0; begin < state.tensor.bytes(); begin += kChunkBytes) {
      const std::int64_t bytes = std::min(kChunkBytes, state.tensor.bytes() - begin);
      if (!file.read(chunk.data(), bytes)) {
        throw Error(str("checkpoint file ", path, " ends early, in ", state.name), ExitCode::data);
      }
      hash = fnv1a(hash, chunk.data(), bytes);
      total += bytes;
      device.copy(static_cast<char*>(state.tensor.raw()) + begin, chunk.data(), bytes, stream);
      stream.synchronize();
    }
  }
  if (total != expected.at("bytes").get<std::int64_t>() || hash != expected.at("checksum").get<std::uint64_t>()) {
    throw Error("checkpoint file " + path + " is damaged: its checksum is not the manifest's", ExitCode::data);
  }
}

bool has_own_state(const Engine& engine, int rank) { return rank == 0 || !engine.describe().replicated_state; }

Json to_json(const LossScaleState& state) {
  return {{"scale", state.scale},
          {"good_steps", state.good_steps},
          {"skipped_steps", state.skipped_steps},
          {"skips_at_minimum", state.skips_at_minimum}};
}

LossScaleState loss_scale_from(const Json& json) {
  return {.scale = json.at("scale").get<double>(),
          .good_steps = json.at("good_steps").get<std::int64_t>(),
          .skipped_steps = json.at("skipped_steps").get<std::int64_t>(),
          .skips_at_minimum = json.at("skips_at_minimum").get<std::int64_t>()};
}

Json read_manifest(const std::string& directory) {
  const std::string path = directory + "/checkpoint/manifest.json";
  if (!file_exists(path)) return nullptr;
  const Json manifest = Json::parse(read_file(path), nullptr, false);
  return manifest.is_object() ? manifest : Json(nullptr);
}

/// Two renames: a kill between them leaves the old one whole under its second name, which the next save or load puts
/// back.
void replace_checkpoint(const std::string& directory) {
  const std::string current = directory + "/checkpoint", fresh = current + ".new", old = current + ".old";
  fs::remove_all(old);
  if (fs::exists(current)) fs::rename(current, old);
  fs::rename(fresh, current);
  sync_directory(directory);
  fs::remove_all(old);
}

void restore_old(const std::string& directory) {
  const std::string current = directory + "/checkpoint", old = current + ".old";
  if (!fs::exists(current + "/manifest.json") && fs::exists(old + "/manifest.json")) {
    fs::remove_all(current);
    fs::rename(old, current);
  }
}

}  // namespace

void save_checkpoint(World& world, Device& device, Engine& engine, const std::string& directory,
                     std::int64_t epochs_done, const CheckpointIdentity& identity) {
  const std::string fresh = directory + "/checkpoint.new";
  if (world.info().rank == 0) {
    fs::remove_all(fresh);
    create_directory(fresh);
  }
  world.barrier();
  Json mine;
  if (has_own_state(engine, world.info().rank))
    mine = write_state(device, engine, fresh + "/" + rank_file(world.info().rank));
  const std::vector<std::string> all = world.gather(mine.dump());
  if (world.info().rank == 0) {
    const TrainingPosition position = engine.position();
    Json manifest = {{"schema_version", 1},
                     {"epochs_done", epochs_done},
                     {"updates", position.updates},
                     {"loss_scale", to_json(position.loss_scale)},
                     {"ranks", world.info().size},
                     {"config_hash", identity.config_hash},
                     {"data_identity", identity.data_identity}};
    for (const std::string& text : all) manifest["files"].push_back(Json::parse(text));
    replace_file(fresh + "/manifest.json", manifest.dump(2) + "\n");
    replace_checkpoint(directory);
  }
  world.barrier();
}

std::int64_t load_checkpoint(World& world, Device& device, Engine& engine, const std::string& directory,
                             const CheckpointIdentity& identity) {
  const Json manifest = read_manifest(directory);
  if (manifest.is_null()) throw ConfigError("--resume: " + directory + " holds no whole checkpoint");
  const auto demand = [&](const std::string& what, const std::string& stored, const std::string& now) {
    if (stored != now) {
      throw ConfigError(str("--resume: the checkpoint's ", what, " is ", stored, ", this run's is ", now,
                            "; resume with the same, or start anew with --force"));
    }
  };
  demand("number of ranks", str(manifest.at("ranks").get<int>()), str(world.info().size));
  demand("configuration hash", manifest.at("config_hash").get<std::string>(), identity.config_hash);
  demand("data identity", manifest.at("data_identity").get<std::string>(), identity.data_identity);
  const int owner = has_own_state(engine, world.info().rank) ? world.info().rank : 0;
  read_state(device, engine, directory + "/checkpoint/" + rank_file(owner),
             manifest.at("files").at(static_cast<std::size_t>(owner)));
  engine.set_position({.updates = manifest.at("updates").get<std::int64_t>(),
                       .loss_scale = loss_scale_from(manifest.at("loss_scale"))});
  world.barrier();
  return manifest.at("epochs_done").get<std::int64_t>();
}

std::int64_t checkpoint_epochs(const std::string& directory) {
  restore_old(directory);
  const Json manifest = read_manifest(directory);
  return manifest.is_null() ? -1 : manifest.value("epochs_done", std::int64_t{-1});
}

void remove_checkpoint(const std::string& directory) {
  for (const char* suffix : {"", ".new", ".old"}) fs::remove_all(directory + "/checkpoint" + suffix);
}

}  // namespace pdl
