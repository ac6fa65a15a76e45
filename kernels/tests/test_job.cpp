// Passes that a stream runs (job.h). A thread plays the stream: it calls what it is given in order, some
// time later, as a CUDA driver's thread would.
#include "job.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "layer.h"

using namespace ktbridge;

namespace {

class Stream {
 public:
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // Its address is what a job takes for cuLaunchHostFunc's.
  static int launch(void* stream, void (*function)(void*), void* data) {
    return static_cast<Stream*>(stream)->take(function, data);
  }
  static std::uintptr_t launcher() { return reinterpret_cast<std::uintptr_t>(&Stream::launch); }
  std::uintptr_t handle() { return reinterpret_cast<std::uintptr_t>(this); }

  // Nothing is called until `open`; so what happens before can be told from what happens after.
  void hold() {
    const std::lock_guard lock(mutex_);
    held_ = true;
  }
  void open() {
    {
      const std::lock_guard lock(mutex_);
      held_ = false;
    }
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.empty() && !busy_; });
  }
  int error = 0;  // what the next launches return

 private:
  int take(void (*function)(void*), void* data) {
    if (error != 0) return error;
    {
      const std::lock_guard lock(mutex_);
      waiting_.emplace_back(function, data);
    }
    changed_.notify_all();
    return 0;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return closed_ || (!waiting_.empty() && !held_); });
      if (waiting_.empty()) return;
      const auto [function, data] = waiting_.front();
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      function(data);
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<void (*)(void*), void*>> waiting_;
  bool closed_ = false, held_ = false, busy_ = false;
  std::thread thread_{&Stream::work, this};  // the last to start, for it uses all of the above
};

std::shared_ptr<Job> queue(Stream& stream, std::function<void(Job&)> pass) {
  auto job = std::make_shared<Job>(std::move(pass));
  job->launch(Stream::launcher(), stream.handle());
  return job;
}

void a_job_is_done_when_the_stream_has_come_to_it() {
  Stream stream;
  stream.hold();
  std::vector<int> ran;
  const auto first = queue(stream, [&](Job&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    ran.push_back(1);
  });
  const auto second = queue(stream, [&](Job&) { ran.push_back(2); });
  CHECK(!first->done() && !second->done());
  CHECK(first->seconds() == 0.0);
  stream.open();
  while (!second->done()) std::this_thread::yield();  // who has seen it done may read what it did
  CHECK((ran == std::vector<int>{1, 2}));
  CHECK(first->done());
  CHECK(first->seconds() >= 0.002);
  first->check();
}

// A job lives until it has run though nobody else holds it, and no longer; so does what its pass holds.
void a_job_outlives_whoever_queued_it() {
  Stream stream;
  stream.hold();
  const auto held = std::make_shared<int>(0);
  const std::weak_ptr<Job> job = queue(stream, [held](Job&) { ++*held; });
  CHECK(!job.expired());
  CHECK(held.use_count() == 2);
  stream.open();
  stream.synchronize();
  CHECK(*held == 1);
  CHECK(job.expired());
  CHECK(held.use_count() == 1);

  const auto kept = queue(stream, [held](Job&) { ++*held; });
  stream.synchronize();
  CHECK(kept->done());
  CHECK(held.use_count() == 1);  // whoever asks for its result holds nothing else of it
}

void a_failure_is_kept_for_who_asks() {
  Stream stream;
  const auto failed = queue(stream, [](Job&) { throw std::out_of_range("no expert 9"); });
  const auto next = queue(stream, [](Job&) {});
  stream.synchronize();
  CHECK(failed->done() && next->done());
  for (int again = 0; again < 2; ++again) CHECK_THROWS(failed->check(), std::out_of_range, "no expert 9");
  next->check();
}

void a_refused_launch_leaves_nothing() {
  Stream stream;
  stream.error = 700;
  const auto held = std::make_shared<int>(0);
  CHECK_THROWS(queue(stream, [held](Job&) { ++*held; }), std::runtime_error, "error 700");
  CHECK(held.use_count() == 1);
  CHECK(*held == 0);
}

// What the bindings queue: a forward, and a backward that takes what it saved, dropped with the last.
void a_backward_takes_what_its_forward_saved() {
  Random random(9);
  const Shape shape{72, 41, 4, 8};
  const Model model(random, shape);
  const Batch batch(random, shape, 40, 2);
  Pool pool(crowd(2));
  const Machine machine{&kernels_for(available_isas().back()), &pool};
  const Computed want = run(machine, model, batch, Keep::retain);

  Stream stream;
  stream.hold();
  Computed once(model, batch), twice(model, batch);
  auto forward =
      queue(stream, [&](Job& job) { job.saved = run_forward(machine, model, batch, Keep::retain, once); });
  const auto queue_backward = [&](Computed& results, bool last) {
    return queue(stream, [&, before = forward, last](Job&) {
      backward(machine, model.experts, model.lora, *before->saved, batch.hidden.data(), batch.d_out.data(),
               results.d_hidden.data(), results.d_weights.data(), gradients(model, results));
      if (last) before->saved.reset();
    });
  };
  CHECK(forward->bytes() == 0u);
  queue_backward(once, false);
  const auto last = queue_backward(twice, true);
  const std::weak_ptr<Job> watched = forward;
  forward.reset();
  CHECK(!watched.expired());
  stream.open();
  stream.synchronize();
  last->check();
  CHECK(watched.expired());
  CHECK(difference(once, want) == "");
  twice.out = once.out;
  CHECK(difference(twice, want) == "");

  forward =
      queue(stream, [&](Job& job) { job.saved = run_forward(machine, model, batch, Keep::retain, once); });
  stream.synchronize();
  CHECK(forward->bytes() == forward->saved->bytes());
  CHECK(forward->bytes() > 0u);
  queue_backward(once, true);
  stream.synchronize();
  CHECK((forward->saved == nullptr));
  CHECK(forward->bytes() > 0u);  // still told, though it is gone
}

// Jobs of several streams share a pool and take turns; callers read results as soon as they are done.
void streams_at_the_same_time() {
  Random random(10);
  const Shape shape{64, 33, 3, 4};
  const Model model(random, shape);
  const Batch batch(random, shape, 33, 2);
  Pool pool(crowd(2));
  const Machine machine{&kernels_for(available_isas().back()), &pool};
  const Computed want = run(machine, model, batch, Keep::recompute);
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Computed>> results;
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 3; ++i) streams.push_back(std::make_unique<Stream>());
  for (int i = 0; i < 12; ++i) {
    results.push_back(std::make_unique<Computed>(model, batch));
    jobs.push_back(queue(*streams[i % 3], [&, at = results.back().get()](Job& job) {
      job.saved = run_forward(machine, model, batch, Keep::recompute, *at);
    }));
  }
  for (int i = 0; i < 12; ++i) {
    while (!jobs[i]->done()) std::this_thread::yield();
    jobs[i]->check();
    CHECK(first_difference(results[i]->out, want.out) == -1);
  }
}

}  // namespace

int main() {
  a_job_is_done_when_the_stream_has_come_to_it();
  a_job_outlives_whoever_queued_it();
  a_failure_is_kept_for_who_asks();
  a_refused_launch_leaves_nothing();
  a_backward_takes_what_its_forward_saved();
  streams_at_the_same_time();
  return check::report();
}
