#pragma once
#include "core/report.h"

// What the ops of linear recurrences report, beside core/report.h: python/attnops/report.py has the words.
namespace attnops {

inline constexpr ReportOp kReportDeltaDecode{19}, kReportSsdDecode{20}, kReportCausalConv1d{21},
    kReportCausalConv1dUpdate{22}, kReportCopyStates{23}, kReportClearStates{24}, kReportDeltaPrefill{28},
    kReportSsdPrefill{29}, kReportDeltaVerify{35}, kReportSsdVerify{36}, kReportDeltaCommit{37}, kReportSsdCommit{38},
    kReportDeltaConvDecode{46}, kReportSsdConvDecode{47};

inline constexpr ReportKind kReportStateSlot{15},  // a slot outside a pool of states
    kReportSharedSlot{16},                         // a slot that two rows of a call write; position: the other row
    kReportTokenBounds{17},                        // tokens of a request that fall, or leave those of the call
    kReportPrefix{27},                             // a prefix below 0
    kReportPlan{28},                               // a plan that names no request, or one twice
    kReportRingLength{30},                         // rows of a ring that leave no room for the drafts
    kReportAccepted{31},                           // more accepted drafts than there are, or fewer than none
    kReportPath{32};                               // an accepted draft that is none, or not behind the one before

}  // namespace attnops
