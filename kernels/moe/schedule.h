// One pass over the experts as a data flow, in one wake-up of the pool.
//
// A pass has four kinds of work: `first` units (a range of panels of one expert), then `between` once for
// each expert when its first units are done, then `second` units of that expert, then `last` units over
// tokens when all second units are done. Units are handed out in that order, largest experts first, and a
// thread whose unit isn't ready yet waits for it: what it waits for was handed out earlier, so somebody
// is working on it. That leaves no barrier in which a thread idles while another finishes a big expert.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "moe/layer.h"

namespace ktbridge {

struct Unit {
  int expert, begin, end;  // panels [begin, end)
};

struct Work {
  int first_panels = 0, second_panels = 0, last_units = 0;
  std::function<void(Unit)> first;
  std::function<void(int expert)> between;
  std::function<void(Unit)> second;
  std::function<void(int unit)> last;
};

// Runs it all. What a unit throws is thrown here, after every thread has stopped.
void run_work(const Machine& machine, const Experts& experts, const Routing& routing, const Work& work);

}  // namespace ktbridge
