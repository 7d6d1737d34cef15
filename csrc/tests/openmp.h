// Replaces the OpenMP runtime that torch loads, in test executables that export their symbols.
#pragma once

#include <thread>
#include <vector>

extern "C" __attribute__((visibility("default"))) void GOMP_parallel(void (*function)(void*),
                                                                     void* argument,
                                                                     unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(function, argument);
  function(argument);
  for (std::thread& other : others) other.join();
}
