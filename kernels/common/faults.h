// A sentence instead of a silent death where a mapped file can no longer be read: it was truncated, or its
// device or network failed. The kernel then sends SIGBUS to whoever touches the page.
#pragma once

#include <string>

namespace ktbridge {

// From now on a SIGBUS in a mapped file writes `before`, the file's path and `behind` to stderr and ends
// the process with status 1; any other does what it did before. A later call changes the words.
void explain_faults(const std::string& before, const std::string& behind);

}  // namespace ktbridge
