/* The arguments of cuStreamBatchMemOp_v2: operations in a stream that wait for a 4-byte word of memory or write one. */
#ifndef COTENANT_WORDS_H
#define COTENANT_WORDS_H

#include <stdint.h>

struct word_operation {
    uint32_t kind, unused_0;
    uint64_t address;
    uint64_t value;
    uint32_t flags, unused_1;
    uint64_t alias;
    uint64_t unused_2;
};
enum { WORD_WAIT = 1, WORD_WRITE = 2 };
/* flags of a wait: until the word is at or past the value (cyclic comparison), or until it equals the value */
enum { WORD_REACHED = 0, WORD_EQUAL = 1 };

#define HOST_REGISTER_PORTABLE_DEVICEMAP 3

#endif
