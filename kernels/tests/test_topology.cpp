// Topology, quota and placement, on machines simulated by files and on the one the test runs on.
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>

#include "check.h"
#include "common/topology.h"

namespace fs = std::filesystem;
using namespace ktbridge;

namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// A root directory that goes with its test.
class Machine {
 public:
  Machine() {
    std::string name = fs::temp_directory_path() / "ktbridge-topology-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("can't make a directory like " + name);
    root_ = name;
  }
  ~Machine() { fs::remove_all(root_); }

  Machine& file(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
    return *this;
  }

  Machine& cpu(int id, int package, int core) {
    const std::string at = "sys/devices/system/cpu/cpu" + std::to_string(id) + "/topology/";
    return file(at + "physical_package_id", std::to_string(package))
        .file(at + "core_id", std::to_string(core));
  }

  std::string root() const { return root_; }

 private:
  fs::path root_;
};

// 2 nodes x `cores` cores x 2 siblings, numbered as Linux does: first siblings first; core ids repeat
// in each package and have gaps.
void two_nodes(Machine& machine, int cores) {
  const auto range = [](int first, int count) {
    return std::to_string(first) + "-" + std::to_string(first + count - 1);
  };
  for (int id = 0; id < 4 * cores; ++id) machine.cpu(id, id / cores % 2, 3 * (id % cores));
  machine.file("sys/devices/system/cpu/online", range(0, 4 * cores));
  for (int node = 0; node < 2; ++node)
    machine.file("sys/devices/system/node/node" + std::to_string(node) + "/cpulist",
                 range(node * cores, cores) + "," + range((node + 2) * cores, cores));
  machine.file("sys/devices/system/node/node2/cpulist", "");  // memory only
  machine.file("sys/devices/system/node/possible", "0-2");
}

std::map<int, int> per_node(const std::vector<Cpu>& cpus) {
  std::map<int, int> result;
  for (const Cpu& cpu : cpus) ++result[cpu.node];
  return result;
}

std::size_t cores_of(const std::vector<Cpu>& cpus) {
  std::set<int> cores;
  for (const Cpu& cpu : cpus) cores.insert(cpu.core);
  return cores.size();
}

std::string ids(const std::vector<Cpu>& cpus) {
  std::string text;
  for (const Cpu& cpu : cpus) text.append(text.empty() ? "" : " ").append(std::to_string(cpu.id));
  return text;
}

void reads_cores_and_nodes() {
  Machine machine;
  two_nodes(machine, 4);
  const std::vector<Cpu> cpus = usable_cpus(machine.root());
  CHECK(cpus.size() == 16u);
  CHECK(cores_of(cpus) == 8u);
  for (int id = 0; id < 16; ++id) {
    CHECK(cpus[id].id == id);
    CHECK(cpus[id].node == id / 4 % 2);
    CHECK(cpus[id].core == cpus[id % 8].core);
  }
  CHECK(default_threads(cpus, kUnlimited) == 8);
}

void dies_repeat_core_ids() {
  Machine machine;
  machine.file("sys/devices/system/cpu/online", "0-1");
  for (int id = 0; id < 2; ++id)
    machine.cpu(id, 0, 0).file("sys/devices/system/cpu/cpu" + std::to_string(id) + "/topology/die_id",
                               std::to_string(id));
  CHECK(cores_of(usable_cpus(machine.root())) == 2u);
}

void places_cores_before_siblings() {
  Machine machine;
  two_nodes(machine, 8);
  const std::vector<Cpu> cpus = usable_cpus(machine.root());
  for (int threads = 1; threads <= 32; ++threads) {
    const std::vector<Cpu> places = place(cpus, threads);
    CHECK(places.size() == static_cast<std::size_t>(threads));
    CHECK(cores_of(places) == static_cast<std::size_t>(std::min(threads, 16)));
    std::map<int, int> nodes = per_node(places);
    CHECK(std::abs(nodes[0] - nodes[1]) <= 1);
    CHECK(ids(place(cpus, 32)).rfind(ids(places), 0) == 0u);
  }
  CHECK(ids(place(cpus, 8)) == "0 8 1 9 2 10 3 11");
  CHECK(ids(place(cpus, 18)) == "0 8 1 9 2 10 3 11 4 12 5 13 6 14 7 15 16 24");
  CHECK(place(cpus, 1000).size() == 32u);
  CHECK(place(cpus, 0).empty());
}

void spreads_in_proportion() {
  Machine machine;
  two_nodes(machine, 4);
  machine.file("affinity", "0-3,6");  // four cores of node 0, one of node 1
  const std::vector<Cpu> cpus = usable_cpus(machine.root());
  CHECK(cpus.size() == 5u);
  std::map<int, int> nodes = per_node(place(cpus, 4));
  CHECK(nodes[0] == 4);
  nodes = per_node(place(cpus, 5));
  CHECK(nodes[0] == 4);
  CHECK(nodes[1] == 1);
}

void affinity_of_siblings_only() {
  Machine machine;
  two_nodes(machine, 4);
  machine.file("affinity", "8-11,1,5");  // the second siblings of node 0, one first, and one of node 1
  const std::vector<Cpu> cpus = usable_cpus(machine.root());
  CHECK(ids(cpus) == "1 5 8 9 10 11");
  CHECK(default_threads(cpus, kUnlimited) == 5);
  CHECK(ids(place(cpus, 5)) == "1 8 10 11 5");  // node 1's only core is used up with its first thread
  CHECK(ids(place(cpus, 6)) == "1 8 10 11 5 9");
}

void missing_files() {
  Machine machine;
  CHECK(ids(usable_cpus(machine.root())) == "0");
  CHECK(cpu_quota(machine.root()) == kUnlimited);
  machine.file("sys/devices/system/cpu/online", "0-2,7");
  const std::vector<Cpu> cpus = usable_cpus(machine.root());
  CHECK(ids(cpus) == "0 1 2 7");
  CHECK(cores_of(cpus) == 4u);
  for (const Cpu& cpu : cpus) CHECK(cpu.node == 0);
  // A machine that knows its packages but not its cores (some virtual ones say -1).
  for (int id : {0, 1}) machine.cpu(id, 0, -1);
  CHECK(cores_of(usable_cpus(machine.root())) == 4u);
}

void nested_quotas_of_v2() {
  Machine machine;
  machine.file("proc/self/cgroup", "0::/pod/box").file("sys/fs/cgroup/pod/box/cpu.max", "250000 100000");
  CHECK(cpu_quota(machine.root()) == 2.5);
  machine.file("sys/fs/cgroup/pod/cpu.max", "150000 100000");
  CHECK(cpu_quota(machine.root()) == 1.5);
  machine.file("sys/fs/cgroup/pod/cpu.max", "max 100000");
  CHECK(cpu_quota(machine.root()) == 2.5);
  machine.file("sys/fs/cgroup/pod/box/cpu.max", "max 100000");
  CHECK(cpu_quota(machine.root()) == kUnlimited);
  machine.file("sys/fs/cgroup/podium/cpu.max", "10000 100000");  // somebody else's
  CHECK(cpu_quota(machine.root()) == kUnlimited);
}

void quota_of_a_container() {
  Machine machine;  // sees the host's path in /proc, and only its own cgroup mounted
  machine.file("proc/self/cgroup", "0::/docker/0123").file("sys/fs/cgroup/cpu.max", "300000 100000");
  CHECK(cpu_quota(machine.root()) == 3);
}

void quotas_of_v1() {
  Machine machine;
  machine.file("proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/a/b\n2:cpuset:/\n1:name=systemd:/x");
  const std::string cpu = "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_", outer = "sys/fs/cgroup/cpu/a/cpu.cfs_";
  machine.file(cpu + "quota_us", "-1").file(cpu + "period_us", "100000");
  CHECK(cpu_quota(machine.root()) == kUnlimited);
  machine.file(cpu + "quota_us", "350000");
  CHECK(cpu_quota(machine.root()) == 3.5);
  machine.file(outer + "quota_us", "100000").file(outer + "period_us", "50000");
  CHECK(cpu_quota(machine.root()) == 2);
}

void default_minds_the_quota() {
  Machine machine;
  two_nodes(machine, 4);
  const std::vector<Cpu> cpus = usable_cpus(machine.root());
  CHECK(default_threads(cpus, 2.5) == 2);
  CHECK(default_threads(cpus, 0.3) == 1);
  CHECK(default_threads(cpus, 8) == 8);
  CHECK(default_threads(cpus, 100) == 8);
}

void choosing_threads() {
  CHECK(choose_threads(7) == 7);
  CHECK(choose_threads(4096) == 4096);
  CHECK_THROWS(choose_threads(-1), std::invalid_argument,
               "threads must be 0 (automatic) or at most 4096, not -1");
  CHECK_THROWS(choose_threads(4097), std::invalid_argument, "not 4097");
  setenv("KTBRIDGE_THREADS", "3", 1);
  CHECK(choose_threads(0) == 3);
  CHECK(choose_threads(5) == 5);
  for (const char* nonsense : {"0", "-2", "4097", "two", "2x", " "}) {
    setenv("KTBRIDGE_THREADS", nonsense, 1);
    CHECK_THROWS(choose_threads(0), std::invalid_argument,
                 "KTBRIDGE_THREADS must be a number from 1 to 4096, not");
  }
  setenv("KTBRIDGE_THREADS", "", 1);
  CHECK(choose_threads(0) == default_threads(usable_cpus(), cpu_quota()));
  unsetenv("KTBRIDGE_THREADS");
  CHECK(choose_threads(0) == default_threads(usable_cpus(), cpu_quota()));
}

void this_machine() {
  const std::vector<Cpu> cpus = usable_cpus();
  CHECK(!cpus.empty());
  CHECK(cpu_quota() > 0);
  for (const Cpu& cpu : cpus) CHECK(cpu.id >= 0 && cpu.node >= 0);

  int resident = 1;
  std::set<int> nodes = {-1};  // -1: a sandbox may forbid the question
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node"))
    if (const std::string name = entry.path().filename(); name.rfind("node", 0) == 0)
      nodes.insert(std::atoi(name.c_str() + 4));
  CHECK(nodes.count(node_of_page(&resident)) == 1u);
  CHECK(node_of_page(nullptr) == -1);
}

}  // namespace

int main() {
  reads_cores_and_nodes();
  dies_repeat_core_ids();
  places_cores_before_siblings();
  spreads_in_proportion();
  affinity_of_siblings_only();
  missing_files();
  nested_quotas_of_v2();
  quota_of_a_container();
  quotas_of_v1();
  default_minds_the_quota();
  choosing_threads();
  this_machine();
  return check::report();
}
