// The CPUs this process may use, how they share cores and NUMA nodes, and which of them threads get.
#pragma once

#include <string>
#include <vector>

namespace ktbridge {

struct Cpu {
  int id = 0;    // as the kernel numbers it
  int core = 0;  // physical core, unique over the machine; SMT siblings share it
  int node = 0;  // NUMA node, as the kernel numbers it
};

// The CPUs this process may run on, by rising id; never empty. A `root` other than "" is a simulated
// machine: <root>/affinity (a cpulist; the online CPUs if missing) and files under <root>/sys. Where the
// machine doesn't say, each CPU is its own core, on node 0.
std::vector<Cpu> usable_cpus(const std::string& root = "");

// CPUs' worth of time the process's cgroups grant, the smallest along the ancestors; infinity if unlimited.
double cpu_quota(const std::string& root = "");

// The CPUs of `threads` threads, thread by thread: a physical core each first, spread over the nodes in
// proportion to their cores; SMT siblings only once every core has a thread. At most cpus.size() of them.
// Deterministic, and fewer threads get a prefix of what more threads get.
std::vector<Cpu> place(const std::vector<Cpu>& cpus, int threads);

// One thread a physical core, but not above the quota: threads beyond it would be stopped mid-phase while
// all the others wait. At least 1.
int default_threads(const std::vector<Cpu>& cpus, double quota);

// NUMA node of the page that holds `address`; -1 if it isn't resident or the kernel won't say.
int node_of_page(const void* address);

// Threads to ask a pool for: a positive wish as it is; 0 takes KTBRIDGE_THREADS if set, else
// default_threads() of this machine. Throws std::invalid_argument for nonsense.
int choose_threads(int wish);

}  // namespace ktbridge
