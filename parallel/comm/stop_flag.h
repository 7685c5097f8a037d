#pragma once
// The wish to stop, as signals express it. `request_stop` in world.h sets it.

namespace pdl {

bool stop_was_requested();

/// SIGTERM, SIGINT and SIGUSR1 set the flag, any number of times; system calls they interrupt are restarted.
void install_stop_handlers();

}  // namespace pdl
