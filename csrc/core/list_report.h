#pragma once
#include "core/report.h"

// What the ops over lists of rows report, beside core/report.h: python/attnops/report.py has the words.
namespace attnops {

inline constexpr ReportOp kReportSparseMlaDecode{26}, kReportSparseMlaPrefill{27};

inline constexpr ReportKind kReportRowIndex{23},  // an index of a list past its pool
    kReportExtraRowIndex{24},                     // the same, of the second list
    kReportListLength{25},                        // a length beyond its list
    kReportExtraListLength{26};                   // the same, of the second list

}  // namespace attnops
