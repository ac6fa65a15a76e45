// Assertions for the kernel tests: CHECK(a == b) prints both sides, CHECK_THROWS wants type and text.
// They may be used from any thread; a test's main ends with `return check::report();`. Failures say which
// `check::Case`s of their thread they happened in.
#pragma once

#include <atomic>
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>

// CHECK reads the left side of an expression through `Probe() <= a == b`, which GCC finds suspicious.
#pragma GCC diagnostic ignored "-Wparentheses"

namespace check {

inline std::atomic<int> checks{0}, failures{0};

inline thread_local std::string cases;

// Names what is being tested, as "[avx2] [rank 8]", while it lives.
class Case {
 public:
  explicit Case(const std::string& name) : before_(cases.size()) { cases += "[" + name + "] "; }
  ~Case() { cases.resize(before_); }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

 private:
  const std::size_t before_;
};

inline void judge(bool held, const char* file, int line, const std::string& what) {
  ++checks;
  if (held) return;
  constexpr int kPrinted = 50;
  if (++failures > kPrinted) return;  // a broken kernel fails everywhere
  std::fprintf(stderr, "%s:%d: %s%s\n", file, line, cases.c_str(), what.c_str());
}

// A test that checked nothing has failed too.
inline int report() {
  if (checks == 0) std::fprintf(stderr, "no check ran\n");
  if (failures != 0) std::fprintf(stderr, "%d of %d checks failed\n", failures.load(), checks.load());
  return failures != 0 || checks == 0;
}

// Reads as a bool and is made from one, for `a == b && c`.
struct Verdict {
  Verdict(bool held, const std::string& values = "") : held(held), values(values) {}
  explicit operator bool() const { return held; }
  bool held;
  std::string values;
};

template <class A, class B>
Verdict compared(bool held, const A& a, const char* sign, const B& b) {
  if (held) return {true, ""};
  std::ostringstream text;
  text.precision(9);  // tells any two floats apart
  text << std::boolalpha << ": " << a << " " << sign << " " << b;
  return {false, text.str()};
}

template <class A>
struct Left {
  const A& a;
  template <class B>
  Verdict operator==(const B& b) const {
    return compared(a == b, a, "==", b);
  }
  template <class B>
  Verdict operator!=(const B& b) const {
    return compared(a != b, a, "!=", b);
  }
  template <class B>
  Verdict operator<(const B& b) const {
    return compared(a < b, a, "<", b);
  }
  template <class B>
  Verdict operator<=(const B& b) const {
    return compared(a <= b, a, "<=", b);
  }
  template <class B>
  Verdict operator>(const B& b) const {
    return compared(a > b, a, ">", b);
  }
  template <class B>
  Verdict operator>=(const B& b) const {
    return compared(a >= b, a, ">=", b);
  }
  operator Verdict() const { return static_cast<bool>(a); }
  explicit operator bool() const { return static_cast<bool>(a); }
};

struct Probe {
  template <class A>
  Left<A> operator<=(const A& a) const {
    return {a};
  }
};

template <class Error, class Body>
void throws(Body body, const std::string& text, const char* file, int line) {
  std::string got = "nothing was thrown";
  try {
    body();
  } catch (const Error& error) {
    const bool held = std::string(error.what()).find(text) != std::string::npos;
    return judge(held, file, line,
                 std::string("the message is \"") + error.what() + "\", not \"" + text + "\"");
  } catch (const std::exception& error) {
    got = std::string("another type was thrown: ") + error.what();
  } catch (...) {
    got = "another type was thrown";
  }
  judge(false, file, line, got);
}

}  // namespace check

#define CHECK(...)                                                                              \
  do {                                                                                          \
    const check::Verdict verdict = check::Probe() <= __VA_ARGS__;                               \
    check::judge(verdict.held, __FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")" + verdict.values); \
  } while (false)

// The expression throws `Error`, and its message contains `text`.
#define CHECK_THROWS(expression, Error, text) \
  check::throws<Error>([&] { static_cast<void>(expression); }, text, __FILE__, __LINE__)
