// CHECK(condition): prints the condition and its location and aborts if it is false.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                               \
    }                                                                             \
  } while (false)

// Returns the Error that `call` must throw.
template <class Error, class Call>
Error expect(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  CHECK(!"expected an error");
  std::abort();
}
