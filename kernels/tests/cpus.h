// The CPUs that a test's process may run on.
#pragma once

#include <sched.h>

#include <vector>

namespace ktbridge {

inline std::vector<int> own_cpus() {
  std::vector<int> cpus;
  cpu_set_t mask[8];  // 8192 CPUs: the kernel refuses a mask smaller than its own
  if (sched_getaffinity(0, sizeof mask, mask) == 0)
    for (int cpu = 0; cpu < static_cast<int>(8 * sizeof mask); ++cpu)
      if (CPU_ISSET_S(cpu, sizeof mask, mask)) cpus.push_back(cpu);
  return cpus;
}

}  // namespace ktbridge
