#pragma once
#include "core/report.h"

// What the ops of the sparse indexer report, beside core/report.h: python/attnops/report.py has the words.
namespace attnops {

inline constexpr ReportOp kReportTopkSelect{25}, kReportStoreIndexK{30}, kReportGatherIndexK{31},
    kReportIndexLogitsPaged{32}, kReportIndexLogits{33}, kReportExpandRows{34}, kReportIndexTopk{41};

inline constexpr ReportKind kReportRowStart{18},  // a row's first key outside the columns
    kReportRowLength{19},                         // keys of a row beyond the columns
    kReportRowRequest{20},                        // a row's request outside the page table
    kReportTableCell{21},                         // a key whose page the page table has no column for
    kReportSlotRange{22},                         // a page or an offset that makes no slot of int32
    kReportKeyRange{29};                          // keys of a row that are not all there, or have no columns

}  // namespace attnops
