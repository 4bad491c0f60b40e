#pragma once
#include "core/report.h"

// What the ops of compressed entries report, beside core/report.h: python/attnops/report.py has the words.
namespace attnops {

inline constexpr ReportOp kReportCompressPlan{44}, kReportCompressKv{45};

inline constexpr ReportKind kReportShortLength{35},  // a length below the request's new tokens
    kReportEntryBound{36},                           // a bound of entries that the lengths do not give
    kReportRotaryPosition{37};                       // an entry's position that cos_sin has no row for

}  // namespace attnops
