//! Trees of drafts: their paths are sequences that begin alike, forks of the request's own.

use super::scheduler::{RequestId, Running, Scheduler};
use super::{BatchError, SequenceId};
use host::Error;

/// A drafted token of a tree: see [`Scheduler::draft_tree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftNode {
    /// The token.
    pub token: u32,
    /// The draft that it comes behind, by its place among them, an earlier one's; none: the request's last token.
    pub parent: Option<usize>,
}

/// A path of a tree but the first, which the request's own sequence has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    pub(super) sequence: SequenceId,
    /// How many of its last tokens are drafts.
    pub(super) drafted: usize,
}

impl Scheduler {
    /// Drafts what may come behind the token that was pushed last, as [`Self::draft`] does, but several tokens behind
    /// the same one: a tree, of which the next step computes every path, from the request's last token to a draft that
    /// none comes behind. [`Self::accept`] takes the longest path whose tokens were chosen.
    ///
    /// **Paths** are sequences of the batch: the first is the request's own, each other one a fork of it, which shares
    /// its pages but for a copy of the one that is not full, and becomes the request's where its tokens are taken; the
    /// others are given up then. So a path takes one of [`BatchOptions::max_sequences`](super::BatchOptions) and one of
    /// `max_prompts`, and of the step's budget and rows of logits one for each of its tokens and for the request's last
    /// one: what paths have in common each computes for itself, so that a wide tree should part early. Paths that there
    /// is no room for are left out, and drafts beyond the capacity. A request that waits gets the sequences of trees.
    ///
    /// **Rows** of a step are those of one path after the other, each with that behind the request's last token first;
    /// [`Self::histories`] has the tokens up to each. Returns how many of the drafts are in paths that were taken.
    ///
    /// **Errors**: those of [`Self::draft`]; [`Error::Invalid`] for a parent that is no earlier draft;
    /// [`BatchError::RecurrentTree`] where a recurrent state could not go back.
    pub fn draft_tree(&mut self, id: RequestId, nodes: &[DraftNode]) -> Result<usize, BatchError> {
        let sequence = self.sequence(id)?;
        if self.batch.is_recurrent {
            return Err(BatchError::RecurrentTree { id });
        }
        for (place, node) in nodes.iter().enumerate() {
            self.batch.model().config().decoder.check_ids(&[node.token])?;
            if let Some(parent) = node.parent.filter(|&parent| parent >= place) {
                let (expected, got) = (format!("an earlier draft than {place}"), parent.to_string());
                return Err(Error::invalid("Scheduler", "parent", expected, got).into());
            }
        }
        self.forget_drafts(id)?;
        let room = self.room_for_drafts(id)?;
        let mut is_taken = vec![false; nodes.len()];
        let mut paths: Vec<Path> = Vec::new();
        for path in paths_of(nodes, room) {
            let own = match paths.len() {
                0 => sequence,
                _ if self.batch.sequences.len() >= self.batch.options.max_sequences => break,
                // Of what the first path has, without its drafts.
                _ => {
                    let fork = self.batch.fork(sequence)?;
                    let known = self.batch.tokens(fork)?.len() - paths[0].drafted;
                    self.batch.truncate(fork, known)?;
                    fork
                }
            };
            paths.push(Path { sequence: own, drafted: path.len() });
            for place in path {
                self.batch.push(own, nodes[place].token)?;
                is_taken[place] = true;
            }
        }
        if let (Some(running), Some((first, others))) = (self.running.get_mut(&id), paths.split_first()) {
            (running.drafted, running.paths) = (first.drafted, others.to_vec());
        }
        Ok(is_taken.into_iter().filter(|&is_taken| is_taken).count())
    }

    /// The tokens up to each row that a step gives for a request, in the order of the rows: those behind which a token
    /// is to be chosen, drafts included.
    ///
    /// **Errors**: [`BatchError::UnknownRequest`], also of one that waits.
    pub fn histories(&self, id: RequestId) -> Result<Vec<&[u32]>, BatchError> {
        let running = self.running.get(&id).ok_or(BatchError::UnknownRequest { id })?;
        let mut histories = Vec::new();
        for Path { sequence, drafted } in running.all_paths() {
            let tokens = self.batch.tokens(sequence)?;
            histories.extend((tokens.len() - drafted..=tokens.len()).map(|end| &tokens[..end]));
        }
        Ok(histories)
    }

    /// Gives up a request's paths behind the first but for so many.
    pub(super) fn keep_paths(&mut self, id: RequestId, kept: usize) -> Result<(), BatchError> {
        let Some(running) = self.running.get_mut(&id).filter(|running| running.paths.len() > kept) else {
            return Ok(());
        };
        let paths = running.paths.split_off(kept);
        paths.into_iter().try_for_each(|path| self.batch.remove(path.sequence))
    }

    /// Makes a path the request's only one.
    pub(super) fn take_path(&mut self, id: RequestId, which: usize) -> Result<(), BatchError> {
        if let Some(running) = self.running.get_mut(&id)
            && let Some(path) = which.checked_sub(1).and_then(|which| running.paths.get_mut(which))
        {
            let first = Path { sequence: running.sequence, drafted: running.drafted };
            let taken = std::mem::replace(path, first);
            (running.sequence, running.drafted) = (taken.sequence, taken.drafted);
        }
        self.keep_paths(id, 0)
    }
}

impl Running {
    /// Of a new sequence.
    pub(super) fn new(sequence: SequenceId) -> Self {
        Running { sequence, is_paused: false, drafted: 0, paths: Vec::new(), awaited: None }
    }

    /// The request's own sequence, and those of the other paths of its tree.
    pub(super) fn all_paths(&self) -> impl Iterator<Item = Path> + use<'_> {
        let first = Path { sequence: self.sequence, drafted: self.drafted };
        std::iter::once(first).chain(self.paths.iter().copied())
    }
}

/// The paths of a tree to the drafts that none comes behind, in the order of these: the places of their drafts, up to
/// so many. None twice, and none that is the beginning of another.
fn paths_of(nodes: &[DraftNode], longest: usize) -> Vec<Vec<usize>> {
    let mut paths: Vec<Vec<usize>> = Vec::new();
    let is_parent = |place: usize| nodes.iter().any(|node| node.parent == Some(place));
    for leaf in (0..nodes.len()).filter(|&place| !is_parent(place)) {
        let mut path: Vec<usize> = std::iter::successors(Some(leaf), |&place| nodes[place].parent).collect();
        path.reverse();
        path.truncate(longest);
        if !path.is_empty() && !paths.iter().any(|other| other.starts_with(&path)) {
            paths.retain(|other| !path.starts_with(other));
            paths.push(path);
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_end_where_nothing_follows() {
        let node = |parent| DraftNode { token: 7, parent };
        let tree = [node(None), node(None), node(Some(1)), node(Some(1)), node(Some(3)), node(Some(0))];
        let all = [vec![1, 2], vec![1, 3, 4], vec![0, 5]];
        assert_eq!(paths_of(&tree, 9), all);
        assert_eq!(paths_of(&tree, 2), [vec![1, 2], vec![1, 3], vec![0, 5]]);
        assert_eq!(paths_of(&tree, 1), [vec![1], vec![0]]);
        assert!(paths_of(&tree, 0).is_empty() && paths_of(&[], 5).is_empty());
    }
}
