// Runs the kernels on random problems and compares them with a reference in float64.
//
//   fuzz --quick                  about 2,000 cases
//   fuzz --long                   20,000 cases
//   fuzz --seed 1 --case 42       one case again
//   fuzz --check-reference        the reference against itself, without kernels
//
// Also: --cases N, --seconds N (stop after that long), --isa NAME (those kernels only), --keep-going (do not stop
// at the first failure). The exit code is 1 if a case failed.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention/kernels.h"
#include "fuzz/buffer.h"
#include "fuzz/check_reference.h"
#include "fuzz/describe.h"
#include "fuzz/draw.h"
#include "fuzz/executors.h"
#include "fuzz/reference.h"

namespace probjax::fuzz {
namespace {

struct Options {
  uint64_t seed = 1;
  int64_t first = 0, cases = 2000;
  double seconds = 1e9;
  std::string isa;
  bool keep_going = false, check_reference = false;
};

// ----------------------------------------------------------------------------------------------------------
// A pass: one of the three functions on one case, with what its results should be

struct Result {
  const Buffer* buffer;
  std::function<Array&(Problem&)> slot;
  Sums certain, possible;
};

struct Pass {
  const char* name;
  void (*Kernels::*function)(const Problem&, Executor&);
  Problem problem;
  int64_t workspace_bytes = 0;
  std::vector<Result> results;
};

// What both kinds of poison leave; they are the same where there is none.
template <class Function>
auto both_kinds(const Case& c, const Problem& p, const Function& function) {
  auto certain = function(Reference(p, Poison::certain));
  auto possible = c.poisoned ? function(Reference(p, Poison::possible)) : certain;
  return std::make_pair(std::move(certain), std::move(possible));
}

Pass forward_pass(const Case& c) {
  Pass pass{"forward", &Kernels::forward, c.problem, 0, {}};
  Problem& p = pass.problem;
  p.moves = p.gradients = {};
  p.out_move = p.lse_move = p.out_cotangent = p.lse_cotangent = {};
  p.key_chunk = 0;
  auto [certain, possible] = both_kinds(c, p, [](Reference r) { return r.forward(); });
  pass.results.push_back({&c.out, [](Problem& p) -> Array& { return p.out; }, certain.out, possible.out});
  pass.results.push_back({&c.lse, [](Problem& p) -> Array& { return p.lse; }, certain.lse, possible.lse});
  return pass;
}

Pass tangent_pass(const Case& c) {
  Pass pass{"tangent", &Kernels::tangent, c.problem, 0, {}};
  Problem& p = pass.problem;
  p.gradients = {};
  p.out_cotangent = p.lse_cotangent = {};
  p.key_chunk = 0;
  auto [certain, possible] = both_kinds(c, p, [](Reference r) { return r.tangent(); });
  auto out = [](Problem& p) -> Array& { return p.out_move; };
  auto lse = [](Problem& p) -> Array& { return p.lse_move; };
  pass.results.push_back({&c.out_move, out, certain.out, possible.out});
  pass.results.push_back({&c.lse_move, lse, certain.lse, possible.lse});
  return pass;
}

Pass backward_pass(const Case& c) {
  Pass pass{"backward", &Kernels::backward, c.problem, c.workspace_bytes, {}};
  Problem& p = pass.problem;
  p.moves = {};
  p.out_move = p.lse_move = {};
  auto [certain, possible] = both_kinds(c, p, [](Reference r) { return r.backward(); });
  for (size_t i = 0; i < c.gradients.size(); ++i) {
    if (!c.gradients[i].array) continue;
    auto slot = [i](Problem& p) -> Array& { return p.gradients[i]; };
    pass.results.push_back({&c.gradients[i], slot, std::move(certain[i]), std::move(possible[i])});
  }
  return pass;
}

// ----------------------------------------------------------------------------------------------------------
// Running

using Memories = std::vector<Memory>;

// The results of one call, in memory of their own.
Memories run(const Pass& pass, const Kernels& kernels, Executor& executor) {
  Problem p = pass.problem;
  Memories memories;
  for (const Result& result : pass.results) {
    memories.emplace_back(result.buffer->memory.bytes());
    result.slot(p) = result.buffer->in(memories.back());
  }
  Memory workspace(pass.workspace_bytes);
  if (workspace.bytes() > 0) p.workspace = workspace.data();
  (kernels.*pass.function)(p, executor);
  return memories;
}

std::unique_ptr<Executor> draw_executor(Random& random, Pool& pool) {
  int64_t threads = random.pick({1, 2, 2, 3, 4, 5, 8, 16});
  switch (random.below(5)) {
    case 0: return std::make_unique<AtOnce>(threads);
    case 1: return std::make_unique<TooLate>(threads);
    default: return std::make_unique<PoolExecutor>(pool, threads);
  }
}

// Calls from several threads at a time, some of them the pool's own.
std::vector<Memories> run_crowd(const Pass& pass, const Kernels& kernels, Pool& pool) {
  std::vector<std::future<Memories>> others;
  for (int64_t threads : {2, 5}) {
    auto task = std::make_shared<std::packaged_task<Memories()>>([&pass, &kernels, &pool, threads] {
      PoolExecutor executor(pool, threads);
      return run(pass, kernels, executor);
    });
    others.push_back(task->get_future());
    pool.schedule([task] { (*task)(); });
  }
  PoolExecutor executor(pool, 4);
  std::vector<Memories> all;
  all.push_back(run(pass, kernels, executor));
  for (auto& other : others) all.push_back(other.get());
  return all;
}

// ----------------------------------------------------------------------------------------------------------
// Comparing

// By pass and type.
struct Statistics {
  double worst = 0;  // error found, in units of what is allowed
  int64_t numbers = 0, poisoned = 0, open = 0;
};

std::map<std::string, Statistics> statistics;

double allowed_error(Type sums, Type type, Number want) {
  // Rounding errors of the sums' type that a unit of the reference's bound stands for.
  double unit = sums == Type::f64 ? 16 * 0x1p-53 : 8 * 0x1p-24;
  // Weights below the least normal number may be flushed to zero.
  double tiny = sums == Type::f64 ? 1e-290 : 1e-30;
  Format f = format(type);
  double last_place = std::ldexp(std::fabs(want.value), -f.precision);
  double least = std::ldexp(1.0, type == Type::f16 ? f.least_exponent - f.precision + 1 : f.least_exponent);
  return unit * want.error + last_place + least + tiny;
}

// Whether one number is what the two kinds of poison say. `ratio` becomes the error in units of that allowed.
bool agrees(Type sums, Type type, bool poisoned, Number certain, Number possible, double got, double& ratio,
            Statistics& count) {
  ratio = 0;
  ++count.numbers;
  if (poisoned && std::isnan(possible.value)) {
    ++count.poisoned;
    return !(std::isnan(certain.value) && std::isfinite(got));
  }
  // What hidden pairs leave is exact: zeros, and minus infinity in a log-sum-exp.
  if (certain.error == 0 && (certain.value == 0 || certain.value == -kInfinity)) return got == certain.value;
  double allowed = allowed_error(sums, type, certain), size = std::fabs(certain.value);
  // Nothing is known of what may overflow; the sign of its infinity, or a NaN, depends on the order of terms.
  if (!(allowed <= std::max(1e30, size)) || !(size + allowed <= 0.99 * format(type).most)) {
    ++count.open;
    return true;
  }
  ratio = std::fabs(got - certain.value) / allowed;
  return ratio <= 1;
}

// Says what is wrong with a result; nothing if all is right.
std::string faults(const Case& c, const Pass& pass, Result& result, const Memory& memory) {
  Array array = result.buffer->in(memory);
  Type type = array.type, sums = c.problem.operands[0].type;
  Statistics& statistic = statistics[std::string(pass.name) + " " + name_of(sums)];
  int64_t wrong = 0, count = 0;
  std::string text;
  each_cell(*result.buffer, [&](int64_t offset) {
    ++count;
    Number certain = cell(result.certain, offset), possible = cell(result.possible, offset);
    double got = load(array, offset), ratio;
    bool right = agrees(sums, type, c.poisoned, certain, possible, got, ratio, statistic);
    if (right) statistic.worst = std::max(statistic.worst, ratio);
    if (right || ++wrong > 4) return;
    char line[200];
    std::snprintf(line, sizeof line, "    number %lld (offset %lld): got %.9g, want %.9g, error %.3g times allowed\n",
                  static_cast<long long>(count - 1), static_cast<long long>(offset), got, certain.value, ratio);
    text += line;
  });
  if (wrong == 0) return {};
  return "  " + result.buffer->name + ": " + std::to_string(wrong) + " of " + std::to_string(count) +
         " numbers are wrong\n" + text;
}

// Whether memory outside of the result is as it was.
bool guards_hold(const Result& result, const Memory& memory) {
  Memory rest = memory.copy();
  int64_t size = size_of(result.buffer->array.type);
  Array array = result.buffer->in(rest);
  each_cell(*result.buffer, [&](int64_t offset) {
    std::memset(const_cast<char*>(element(array, offset)), 0xFF, size);
  });
  return rest == Memory(rest.bytes());
}

std::string compare(const Case& c, Pass& pass, const Memories& memories) {
  std::string text;
  for (size_t i = 0; i < memories.size(); ++i) {
    text += faults(c, pass, pass.results[i], memories[i]);
    if (!guards_hold(pass.results[i], memories[i])) {
      text += "  " + pass.results[i].buffer->name + ": wrote outside of the array\n";
    }
  }
  return text;
}

// ----------------------------------------------------------------------------------------------------------
// A case

std::vector<const Buffer*> inputs(const Case& c) {
  std::vector<const Buffer*> list = {&c.out, &c.lse, &c.out_cotangent, &c.lse_cotangent};
  for (const Buffer& x : c.operands) list.push_back(&x);
  for (const Buffer& x : c.moves) list.push_back(&x);
  return list;
}

// Runs one pass with one set of kernels, sometimes in several ways. Returns what is wrong.
std::string check_pass(const Case& c, Pass& pass, const Kernels& kernels, Random& random, Pool& pool) {
  std::vector<const Buffer*> given = inputs(c);
  Memories before;
  for (const Buffer* x : given) before.push_back(x->memory.copy());

  Memories first = run(pass, kernels, *draw_executor(random, pool));
  std::string text = compare(c, pass, first);
  std::vector<Memories> others;
  if (random.chance(0.2)) others.push_back(run(pass, kernels, *draw_executor(random, pool)));
  if (random.chance(0.05)) others = run_crowd(pass, kernels, pool);
  for (const Memories& other : others)
    if (!(other == first)) text += "  another run with other threads gives other bits\n";
  for (size_t i = 0; i < given.size(); ++i)
    if (!(given[i]->memory == before[i])) text += "  an input changed: " + given[i]->name + "\n";
  if (!text.empty()) text = std::string("  ") + pass.name + " by " + kernels.name + "\n" + text;
  return text;
}

// Returns what is wrong.
std::string check_case(Case& c, const Options& options, Random& random, Pool& pool) {
  std::string text;
  auto check = [&](Pass pass) {
    for (const Kernels* const* kernels = all_kernels(); *kernels; ++kernels) {
      if (!options.isa.empty() && options.isa != (*kernels)->name) continue;
      text += check_pass(c, pass, **kernels, random, pool);
    }
    return pass;
  };
  Pass forward = check(forward_pass(c));
  // The others take the results of a right forward.
  store_sums(c.out, forward.results[0].possible);
  store_sums(c.lse, forward.results[1].possible);
  check(tangent_pass(c));
  check(backward_pass(c));
  return text;
}

// ----------------------------------------------------------------------------------------------------------
// All cases

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

int fuzz(const Options& options) {
  Pool pool(4);
  int64_t failures = 0, done = 0;
  double start = now(), told = start;
  for (; done < options.cases && now() - start < options.seconds; ++done) {
    int64_t number = options.first + done;
    Random random(options.seed, number);
    Case c = Draw(random)();
    std::string text = check_case(c, options, random, pool);
    if (!text.empty()) {
      ++failures;
      std::printf("FAILED: fuzz --seed %llu --case %lld\n%s%s\n", static_cast<unsigned long long>(options.seed),
                  static_cast<long long>(number), text.c_str(), describe(c).c_str());
      if (!options.keep_going) break;
    }
    if (now() - told > 10) {
      told = now();
      std::printf("%lld cases, %.0f s\n", static_cast<long long>(done), told - start);
    }
    std::fflush(stdout);
  }
  for (const auto& [name, s] : statistics) {
    std::printf("%-14s %10lld numbers, %.2g poisoned, %.2g open; largest error %.2f of what is allowed\n",
                name.c_str(), static_cast<long long>(s.numbers), double(s.poisoned) / double(s.numbers),
                double(s.open) / double(s.numbers), s.worst);
  }
  std::printf("%lld failed of %lld cases, seed %llu, %.0f s\n", static_cast<long long>(failures),
              static_cast<long long>(done + (failures && !options.keep_going)),
              static_cast<unsigned long long>(options.seed), now() - start);
  return failures ? 1 : 0;
}

[[noreturn]] void usage(const char* what) {
  std::fprintf(stderr, "fuzz: %s\nusage: fuzz [--quick | --long | --cases N] [--seconds N] [--seed N] [--case N] "
                       "[--isa NAME] [--keep-going] [--check-reference]\n", what);
  std::exit(2);
}

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    std::string word = words[i];
    auto next = [&]() -> const char* { return i + 1 < count ? words[++i] : (usage("a value is missing"), ""); };
    if (word == "--quick") options.cases = 2000;
    else if (word == "--long") options.cases = 20000;
    else if (word == "--cases") options.cases = std::atoll(next());
    else if (word == "--seconds") options.seconds = std::atof(next());
    else if (word == "--seed") options.seed = std::strtoull(next(), nullptr, 10);
    else if (word == "--isa") options.isa = next();
    else if (word == "--keep-going") options.keep_going = true;
    else if (word == "--check-reference") options.check_reference = true;
    else if (word == "--case") options.first = std::atoll(next()), options.cases = 1;
    else usage(("what is " + word + "?").c_str());
  }
  return options;
}

bool exists(const std::string& isa) {
  for (const Kernels* const* kernels = all_kernels(); *kernels; ++kernels)
    if (isa == (*kernels)->name) return true;
  return false;
}

int main_of(const Options& options) {
  if (options.check_reference) return check_reference(options.seed, options.cases);
  if (!options.isa.empty() && !exists(options.isa)) usage("this processor has no such kernels");
  return fuzz(options);
}

}  // namespace
}  // namespace probjax::fuzz

int main(int count, char** words) { return probjax::fuzz::main_of(probjax::fuzz::parse(count, words)); }
