// The one mutable global of the project: a signal handler has nothing else that it may reach.

#include "parallel/comm/stop_flag.h"

#include <atomic>
#include <csignal>

#include "parallel/comm/world.h"

namespace pdl {
namespace {

std::atomic<bool> stop_flag{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

void on_signal(int) { request_stop(); }

}  // namespace

void request_stop() { stop_flag.store(true, std::memory_order_relaxed); }

bool stop_was_requested() { return stop_flag.load(std::memory_order_relaxed); }

void install_stop_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  // A launcher often forwards a Ctrl-C that the terminal has already sent, so a second signal must not mean more than
  // the first.
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
}

}  // namespace pdl
