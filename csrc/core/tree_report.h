#pragma once
#include "core/report.h"

// What the ops over draft trees record. Apart from core/report.h, so that no kernel of attention is compiled anew for
// them. The numbers go on where that file's end; python/attnops/report.py has both.
namespace attnops {

inline constexpr ReportOp kReportBuildDraftTree{12}, kReportVerifyTreeGreedy{13}, kReportVerifyTreeSampling{14};
inline constexpr ReportOp kReportMoveKv{15}, kReportCopyPageTail{16}, kReportDraftKvIndices{17};
inline constexpr ReportOp kReportPackTreeMask{18};

inline constexpr ReportKind kReportTreeParent{6};     // a node's parent that does not stand before it in the tree
inline constexpr ReportKind kReportTreeLink{7};       // a child or sibling that is no node of the tree, or a circle
inline constexpr ReportKind kReportTreeIndex{8};      // a node's row, from its request's first, that is none of it
inline constexpr ReportKind kReportTokenIndex{9};     // a token outside the vocabulary
inline constexpr ReportKind kReportProbability{10};   // a token whose probability is negative, infinite or NaN
inline constexpr ReportKind kReportAcceptIndex{11};   // an accepted row of another request, or before its place
inline constexpr ReportKind kReportDraftCells{12};    // cells that drafts need beyond those of req_to_token
inline constexpr ReportKind kReportMaskBounds{13};    // bytes of a request's mask that are no N rows, or not in it
inline constexpr ReportKind kReportHiddenPrefix{14};  // a mask that hides a key of the prefix

}  // namespace attnops
