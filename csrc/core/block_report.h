#pragma once
#include "core/report.h"

// What the op over lists of blocks reports, beside core/report.h: python/attnops/report.py has the words.
namespace attnops {

inline constexpr ReportOp kReportBuildBlockTables{42}, kReportLabelScores{43};

inline constexpr ReportKind kReportBlockIndex{33},  // a block past the keys of its request
    kReportBlockRoom{34};                           // cells that a table lacks

}  // namespace attnops
