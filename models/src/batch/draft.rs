//! Guesses at what comes next.

/// Drafts what came behind an earlier occurrence of a sequence's last tokens (prompt lookup): of use where answers
/// repeat what they have read, as in summaries, edits of code and long quotations. Costs no model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramDraft {
    /// Most tokens at the end that are looked for; longer matches go before shorter ones.
    pub longest: usize,
    /// Fewest, at least 1.
    pub shortest: usize,
    /// Most tokens that are drafted.
    pub tokens: usize,
}

impl Default for NgramDraft {
    fn default() -> Self {
        NgramDraft { longest: 4, shortest: 2, tokens: 8 }
    }
}

impl NgramDraft {
    /// What came behind the latest of the longest matches; nothing where there is none.
    pub fn draft<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        for len in (self.shortest.max(1)..=self.longest.min(tokens.len())).rev() {
            let start = tokens.len() - len;
            let end = &tokens[start..];
            let found = (0..start).rev().find(|&at| tokens[at..].starts_with(end));
            if let Some(at) = found {
                let from = at + len;
                return &tokens[from..tokens.len().min(from.saturating_add(self.tokens))];
            }
        }
        &[]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_follow_the_latest_longest_match() {
        let two = NgramDraft { longest: 3, shortest: 2, tokens: 2 };
        for (draft, tokens, want) in [
            (two, &[1, 2, 3, 4, 1, 2][..], &[3, 4][..]),
            // The later one.
            (two, &[1, 2, 3, 1, 2, 4, 1, 2], &[4, 1]),
            // The longer one.
            (two, &[9, 1, 2, 3, 1, 2, 4, 9, 1, 2], &[3, 1]),
            // It may overlap, and end where the tokens do.
            (two, &[5, 5, 5], &[5]),
            (two, &[1, 2, 3], &[]),
            (two, &[1], &[]),
            (two, &[], &[]),
            (NgramDraft { shortest: 0, ..two }, &[7, 8, 7], &[8, 7]),
            (NgramDraft { tokens: 0, ..two }, &[1, 2, 3, 1, 2], &[]),
            // As long as can be, and as many as there are.
            (NgramDraft { longest: usize::MAX, ..two }, &[1, 2, 3, 1, 2], &[3, 1]),
            (NgramDraft { tokens: usize::MAX, ..two }, &[1, 2, 3, 1, 2], &[3, 1, 2]),
        ] {
            assert_eq!(draft.draft(tokens), want, "{draft:?} {tokens:?}");
        }
    }
}
