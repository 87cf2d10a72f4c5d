// Cycles of threadgroup memory, which has 32 banks of four bytes: in one cycle each gives one word to
// all lanes that want it. The lanes of a SIMD-group run one after the other until they meet; what one
// instruction of theirs touches in its n-th turn since then is put together here.
#pragma once
#include "state.h"

constexpr uint32_t BANKS = 32, MOST_TURNS = 1024;

struct Turn {
    const void* pc;
    uint32_t counts[BANKS];
    uint32_t words[BANKS][WIDTH];
};

inline Turn turns[MOST_TURNS];
inline uint32_t turn_count;
inline uint32_t next_turn[WIDTH];  // of each lane

inline void note_banks(uint64_t address, uint32_t size, const void* pc) {
    uint32_t& n = next_turn[self->lane];
    while (n < turn_count && turns[n].pc != pc) ++n;  // other lanes took another branch
    if (n == MOST_TURNS) return;
    Turn& turn = turns[n];
    if (n++ == turn_count) {
        ++turn_count;
        turn.pc = pc;
        memset(turn.counts, 0, sizeof turn.counts);
    }
    for (uint64_t word = address / 4; word <= (address + size - 1) / 4; ++word) {
        uint32_t* words = turn.words[word % BANKS];
        uint32_t& count = turn.counts[word % BANKS];
        uint32_t i = 0;
        while (i < count && words[i] != static_cast<uint32_t>(word)) ++i;
        if (i == count && count < WIDTH) words[count++] = static_cast<uint32_t>(word);
    }
}

// The lanes have met.
inline void end_turns() {
    for (uint32_t n = 0; n < turn_count; ++n) {
        uint32_t most = 0;
        for (uint32_t count : turns[n].counts) most = count > most ? count : most;
        launch->counters.threadgroup_cycles += most;
    }
    turn_count = 0;
    memset(next_turn, 0, sizeof next_turn);
}
