// pdlbench info: what this build and these ranks are, to be read before the first run on a new machine.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/commands/commands.h"
#include "cli/experiment.h"
#include "cli/table.h"
#include "pdl_build_info.h"

namespace pdl {
namespace {

using Json = nlohmann::ordered_json;

Json describe_rank(const RankInfo& rank, const DeviceInfo& device) {
  return {
      {"rank", rank.rank},   {"host", rank.host},         {"local_rank", rank.local_rank},      {"device", device.kind},
      {"name", device.name}, {"threads", device.threads}, {"memory_bytes", device.memory_bytes}};
}

}  // namespace

int info_command(World& world, const Args& args) {
  const RankInfo& rank = world.info();
  const int gpus = device_count("cuda");
  const std::unique_ptr<Device> cpu = make_device({.kind = "cpu", .threads = threads_per_rank({}, rank)});
  const std::unique_ptr<Device> gpu =
      gpus > 0 ? make_device({.kind = "cuda", .ordinal = rank.local_rank % gpus}) : nullptr;
  const Device* const device = gpu ? gpu.get() : cpu.get();
  const std::unique_ptr<Backend> backend = make_backend(*cpu, {});
  const std::vector<std::string> ranks = world.gather(describe_rank(rank, device->info()).dump());
  if (rank.rank != 0) return 0;
  Json json;
  json["version"] = str(kVersion);
  json["git"] = str(kGitSha, kGitDirty ? " (modified)" : "");
  json["compiler"] = str(kCompiler);
  json["build"] = str(kBuildType, " ", kFlags);
  json["mpi"] = rank.mpi_library;
  json["launcher"] = rank.launcher;
  json["cpu_library"] = backend->library();
  json["cuda"] = !PDL_WITH_CUDA ? "not in this build"
                 : gpu          ? str(make_backend(*gpu, {})->library(), ", ", gpus, " visible")
                                : "in this build; no GPU is visible";
  json["ranks"] = Json::array();
  for (const std::string& text : ranks) json["ranks"].push_back(Json::parse(text));
  if (args.json) {
    std::printf("%s\n", json.dump(2).c_str());
    return 0;
  }
  for (const auto& [key, value] : json.items()) {
    if (key != "ranks") std::printf("%-12s %s\n", key.c_str(), value.get<std::string>().c_str());
  }
  std::vector<std::vector<std::string>> rows;
  for (const Json& entry : json["ranks"]) {
    rows.push_back({str(entry["rank"].get<int>()), entry["host"], str(entry["local_rank"].get<int>()), entry["device"],
                    entry["name"], str(entry["threads"].get<int>()),
                    format_bytes(entry["memory_bytes"].get<std::int64_t>())});
  }
  std::printf("\n%s", format_table({"rank", "host", "local", "device", "name", "threads", "memory"}, rows).c_str());
  return 0;
}

}  // namespace pdl
