#include "common/topology.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

namespace ktbridge {
namespace {

constexpr int kMostThreads = 4096;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int number_in(const std::string& path, int otherwise) {
  std::istringstream text(first_line(path));
  int value;
  return text >> value ? value : otherwise;
}

// "0-3,8,10-11", the kernel's way to write a set of CPUs.
std::vector<int> parse_cpulist(const std::string& text) {
  std::vector<int> result;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::istringstream bounds(range);
    int first, last;
    char dash;
    if (!(bounds >> first)) continue;
    if (!(bounds >> dash >> last)) last = first;
    for (int id = first; id <= last; ++id) result.push_back(id);
  }
  return result;
}

std::vector<int> affinity(const std::string& root) {
  std::vector<int> ids;
  if (root.empty()) {
    // The kernel refuses a mask smaller than its own, and cpu_set_t alone ends at 1024 CPUs.
    cpu_set_t mask[8];
    // Of the process, not of the calling thread, which somebody may have pinned.
    if (sched_getaffinity(getpid(), sizeof mask, mask) == 0)
      for (int id = 0; id < static_cast<int>(8 * sizeof mask); ++id)
        if (CPU_ISSET_S(id, sizeof mask, mask)) ids.push_back(id);
  } else {
    ids = parse_cpulist(first_line(root + "/affinity"));
    if (ids.empty()) ids = parse_cpulist(first_line(root + "/sys/devices/system/cpu/online"));
  }
  if (ids.empty()) ids.push_back(0);
  std::sort(ids.begin(), ids.end());
  return ids;
}

std::map<int, int> nodes_of_cpus(const std::string& root) {
  std::map<int, int> result;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/sys/devices/system/node", none)) {
    const std::string name = entry.path().filename();
    if (name.size() < 5 || name.compare(0, 4, "node") != 0 ||
        name.find_first_not_of("0123456789", 4) != std::string::npos)
      continue;
    for (int id : parse_cpulist(first_line(entry.path() / "cpulist"))) result[id] = std::stoi(name.substr(4));
  }
  return result;
}

// One cgroup's limit, whichever version its directory belongs to.
double quota_of(const std::string& directory) {
  double quota = -1, period = 0;
  std::istringstream both(first_line(directory + "/cpu.max"));  // "max 100000" leaves quota at 0
  if (!(both >> quota >> period)) {
    quota = number_in(directory + "/cpu.cfs_quota_us", -1);
    period = number_in(directory + "/cpu.cfs_period_us", 0);
  }
  return quota > 0 && period > 0 ? quota / period : kUnlimited;
}

// Ancestors count too. In a container the path is often the host's, unknown below the mount: then the
// walk up ends at the mount, which is the container's own cgroup.
double quota_up(const std::string& mount, std::string group) {
  double smallest = quota_of(mount);
  for (; group.size() > 1; group.resize(group.rfind('/')))
    smallest = std::min(smallest, quota_of(mount + group));
  return smallest;
}

}  // namespace

std::vector<Cpu> usable_cpus(const std::string& root) {
  const std::map<int, int> nodes = nodes_of_cpus(root);
  // Core ids repeat between packages, and on some machines between the dies of one.
  std::map<std::array<int, 3>, int> cores;
  std::vector<Cpu> result;
  for (int id : affinity(root)) {
    const std::string at = root + "/sys/devices/system/cpu/cpu" + std::to_string(id) + "/topology/";
    const int package = number_in(at + "physical_package_id", -1), core = number_in(at + "core_id", -1);
    std::array<int, 3> key = {package, number_in(at + "die_id", 0), core};
    if (package < 0 || core < 0) key = {-1, 0, id};
    const auto node = nodes.find(id);
    const int number = cores.try_emplace(key, static_cast<int>(cores.size())).first->second;
    result.push_back({id, number, node == nodes.end() ? 0 : node->second});
  }
  return result;
}

double cpu_quota(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  double smallest = kUnlimited;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:path
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      group = line.substr(second + 1);
    std::vector<std::string> mounts;
    if (controllers.empty())
      mounts = {mount, mount + "/unified"};
    else if (("," + controllers + ",").find(",cpu,") != std::string::npos)
      mounts = {mount + "/cpu", mount + "/" + controllers};
    for (const std::string& candidate : mounts) smallest = std::min(smallest, quota_up(candidate, group));
  }
  return smallest;
}

std::vector<Cpu> place(const std::vector<Cpu>& cpus, int threads) {
  std::vector<Cpu> sorted = cpus;
  std::sort(sorted.begin(), sorted.end(), [](const Cpu& a, const Cpu& b) { return a.id < b.id; });
  // queues[n][node]: the n-th sibling of each of the node's cores.
  std::vector<std::map<int, std::vector<Cpu>>> queues;
  std::map<int, std::size_t> seen;
  for (const Cpu& cpu : sorted) {
    const std::size_t sibling = seen[cpu.core]++;
    if (sibling == queues.size()) queues.emplace_back();
    queues[sibling][cpu.node].push_back(cpu);
  }
  std::vector<Cpu> result;
  for (const auto& nodes : queues) {
    // Ordered by the share of its node that is taken with it, CPUs interleave in proportion.
    std::vector<std::pair<double, Cpu>> order;
    for (const auto& [node, queue] : nodes)
      for (std::size_t i = 0; i < queue.size(); ++i)
        order.emplace_back(static_cast<double>(i + 1) / static_cast<double>(queue.size()), queue[i]);
    std::stable_sort(order.begin(), order.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [share, cpu] : order)
      if (static_cast<int>(result.size()) < threads) result.push_back(cpu);
  }
  return result;
}

int default_threads(const std::vector<Cpu>& cpus, double quota) {
  std::set<int> cores;
  for (const Cpu& cpu : cpus) cores.insert(cpu.core);
  return std::max(1, static_cast<int>(std::min(static_cast<double>(cores.size()), std::floor(quota))));
}

int node_of_page(const void* address) {
  const auto offset = reinterpret_cast<std::uintptr_t>(address) % sysconf(_SC_PAGESIZE);
  const void* page = static_cast<const char*>(address) - offset;
  int node = -1;
  // Without target nodes the call moves nothing and tells each page's node, or -ENOENT and its like.
  return syscall(SYS_move_pages, 0, 1UL, &page, nullptr, &node, 0) == 0 ? std::max(node, -1) : -1;
}

int choose_threads(int wish) {
  if (wish < 0 || wish > kMostThreads)
    throw std::invalid_argument("threads must be 0 (automatic) or at most " + std::to_string(kMostThreads) +
                                ", not " + std::to_string(wish));
  if (wish > 0) return wish;
  if (const char* text = std::getenv("KTBRIDGE_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end != '\0' || value < 1 || value > kMostThreads)
      throw std::invalid_argument(std::string("KTBRIDGE_THREADS must be a number from 1 to 4096, not '") +
                                  text + "'");
    return static_cast<int>(value);
  }
  return default_threads(usable_cpus(), cpu_quota());
}

}  // namespace ktbridge
