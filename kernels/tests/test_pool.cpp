// The pool's promises: every thread once, all ended on return, errors to the caller.
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>

#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/pool.h"
#include "cpus.h"

using namespace ktbridge;

namespace {

// More threads than this machine may have CPUs, so that they also meet asleep and descheduled; an
// impossible CPU makes the pin fail, which must not matter.
std::vector<Place> crowd(int threads) {
  const std::vector<int> cpus = own_cpus();
  std::vector<Place> places;
  for (int i = 0; i < threads; ++i) places.push_back({cpus[i % cpus.size()], i % 2 == 0 ? 5 : 2});
  places.back().cpu = 8000;
  return places;
}

void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }  // workers fall asleep

void every_thread_runs_once() {
  for (int threads : {1, 2, 3, 8}) {
    Pool pool(crowd(threads));
    CHECK(pool.threads() == threads);
    std::vector<int> runs(threads);  // plain on purpose: a thread sanitizer sees a missing barrier
    const std::thread::id caller = std::this_thread::get_id();
    for (int i = 0; i < 3; ++i) {
      pool.run([&](int thread) {
        ++runs[thread];
        CHECK((std::this_thread::get_id() == caller) == (thread == 0));
      });
      rest();
    }
    for (int count : runs) CHECK(count == 3);
  }
}

void ten_thousand_tiny_runs() {
  Pool pool(crowd(2));
  long sums[2] = {};
  for (int i = 0; i < 10000; ++i) {
    pool.run([&](int thread) { sums[thread] += i; });
    if (sums[0] != sums[1]) break;
  }
  CHECK(sums[0] == 10000L * 9999 / 2);
  CHECK(sums[1] == sums[0]);
}

void exceptions_reach_the_caller() {
  for (int threads : {1, 3}) {
    Pool pool(crowd(threads));
    for (int guilty = 0; guilty < threads; ++guilty) {
      std::vector<int> ended(threads);
      const auto body = [&](int thread) {
        if (thread == guilty) throw std::runtime_error("thread " + std::to_string(thread));
        rest();
        ended[thread] = 1;
      };
      CHECK_THROWS(pool.run(body), std::runtime_error, "thread " + std::to_string(guilty));
      CHECK(std::accumulate(ended.begin(), ended.end(), 0) == threads - 1);
    }
    CHECK_THROWS(pool.run([](int) { throw std::runtime_error("all of them"); }), std::runtime_error,
                 "all of");
    int quiet = 0;  // an old failure doesn't come back
    pool.run([&](int thread) {
      if (thread == 0) quiet = 1;
    });
    CHECK(quiet == 1);
  }
}

void callers_take_turns_by_the_guard() {
  Pool pool(crowd(3));
  std::vector<int> sums(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int j = 0; j < 50; ++j) {
        std::lock_guard lock(pool.guard());
        pool.run([&](int thread) { ++sums[thread]; });
        pool.run([&](int thread) { ++sums[thread]; });
      }
    });
  for (std::thread& caller : callers) caller.join();
  for (int sum : sums) CHECK(sum == 400);
}

void a_forked_child_is_refused() {
  Pool pool(crowd(2));
  // All threads have started: one that is starting holds locks of AddressSanitizer's, which a child would
  // wait for.
  for (Pool* each : {&pool, &Pool::shared(crowd(2))}) each->run([](int) {});
  const pid_t child = fork();
  if (child == 0) {
    const auto refused = [](auto call) {
      try {
        call();
      } catch (const std::runtime_error& error) {
        return std::string(error.what()).find("don't survive fork()") != std::string::npos;
      }
      return false;
    };
    alarm(20);
    const bool right = refused([&] { pool.run([](int) {}); });
    // What needs no thread of the parent's works: one thread, and a pool made here.
    Pool::shared(crowd(1)).run([](int) {});
    std::atomic<int> runs = 0;
    Pool::shared(crowd(2)).run([&](int) { ++runs; });
    _exit(right && runs == 2 ? 42 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 42);
}

void knows_its_nodes() {
  Pool pool(crowd(4));
  CHECK(pool.nodes() == 2);
  CHECK(pool.node(0) == 5);
  CHECK(pool.node(1) == 2);
  CHECK(pool.node_index(2) == 0);
  CHECK(pool.node_index(5) == 1);
  for (int node : {-1, 0, 3, 6}) CHECK(pool.node_index(node) == -1);
}

void knows_the_node_of_a_page() {
  int resident = 1;
  CHECK(node_of_page(&resident) >= -1);  // -1: a sandbox may forbid the question
  CHECK(node_of_page(nullptr) == -1);
}

void places_share_a_pool() {
  Pool& pool = Pool::shared(crowd(3));
  CHECK(pool.threads() == 3);
  CHECK(&pool == &Pool::shared(crowd(3)));
  CHECK(&pool != &Pool::shared(crowd(2)));
  CHECK_THROWS(Pool({}), std::invalid_argument, "at least one");
}

void workers_stay_off_the_callers_cpu() {
  const std::vector<int> cpus = own_cpus();
  if (cpus.size() < 2) return;
  const std::vector<Place> places = {{cpus[0], 0}, {cpus[1], 0}};
  cpu_set_t before;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
  Pool pool(places);
  for (int turn : {0, 1, 1, 0}) {
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(places[turn].cpu, &here);
    CHECK(sched_setaffinity(0, sizeof here, &here) == 0);
    int cpu[2] = {-1, -1};
    pool.run([&](int thread) { cpu[thread] = sched_getcpu(); });
    CHECK(cpu[0] == places[turn].cpu);
    CHECK(cpu[1] == places[1 - turn].cpu);
    cpu_set_t after;
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&after, &here));  // the caller's own affinity is left alone
  }
  CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}

}  // namespace

int main() {
  a_forked_child_is_refused();  // first: a sanitizer wants few threads around a fork
  every_thread_runs_once();
  ten_thousand_tiny_runs();
  exceptions_reach_the_caller();
  callers_take_turns_by_the_guard();
  knows_its_nodes();
  knows_the_node_of_a_page();
  places_share_a_pool();
  workers_stay_off_the_callers_cpu();
  return check::report();
}
