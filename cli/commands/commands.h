#pragma once
// The commands of pdlbench. Each returns the exit code of a regular end and throws Error for everything else.

#include "cli/args.h"
#include "parallel/comm/world.h"

namespace pdl {

int run_command(World& world, const Args& args);
int verify_command(World& world, const Args& args);
int profile_command(World& world, const Args& args);
int info_command(World& world, const Args& args);

int plan_command(const Args& args);
int list_command(const Args& args);
int report_command(const Args& args);
int data_inspect_command(const Args& args);
int data_prepare_command(const Args& args);

}  // namespace pdl
