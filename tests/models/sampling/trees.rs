//! Trees of drafts: the tokens are those without, whichever paths there is room for.

use super::*;

/// With room for four paths of each of four requests.
const WIDE: BatchOptions = BatchOptions {
    max_sequences: 16,
    max_step_tokens: 64,
    max_prompts: 16,
    max_logits: 64,
    pages: 40,
    ..OPTIONS
};

/// A tree of which every right token has a wrong one beside it, in a path before.
pub(super) fn tree(right: &[u32]) -> Vec<DraftNode> {
    let (mut nodes, mut parent) = (Vec::new(), None);
    for &token in right {
        nodes.extend([token ^ 1, token].map(|token| DraftNode { token, parent }));
        parent = Some(nodes.len() - 1);
    }
    nodes
}

#[test]
fn trees_change_no_token() -> Outcome {
    for name in ["qwen3", "qwen3_sliding", "qwen3_moe", "qwen3_vl", "glm4_moe_lite"] {
        let model = model(name)?;
        let (want, plain) = answers(&model, WIDE, Drafts::Nothing, &[])?;
        for options in [
            WIDE,
            // Few paths, few rows, a small budget, few pages, pages that are read once for all paths.
            BatchOptions { max_sequences: 6, ..WIDE },
            BatchOptions { max_prompts: 3, ..WIDE },
            BatchOptions { max_logits: 16, ..WIDE },
            BatchOptions { max_step_tokens: 9, ..WIDE },
            BatchOptions { pages: 6, ..WIDE },
            BatchOptions { shared_prefix: SharedPrefix::Always, ..WIDE },
        ] {
            let (got, steps) = answers(&model, options, Drafts::Tree, &want)?;
            assert_eq!(got, want, "{name} {options:?}");
            if options == WIDE {
                assert!(3 * steps < plain + 15, "{name}: {steps} steps, {plain} without drafts");
            }
        }
    }
    Ok(())
}

#[test]
fn a_path_becomes_the_request() -> Outcome {
    let model = model("qwen3")?;
    let mut scheduler = Scheduler::new(model.batch(WIDE)?);
    let id = scheduler.submit(&[1; 17])?;
    scheduler.step()?;
    scheduler.push(id, 2)?;
    let node = |token, parent| DraftNode { token, parent };
    let nodes = [node(3, None), node(4, None), node(5, Some(1)), node(6, Some(1)), node(7, Some(0))];
    assert_eq!(scheduler.draft_tree(id, &nodes)?, 5);
    let stats = scheduler.batch().stats();
    assert_eq!((stats.sequences, scheduler.num_running()), (3, 1));
    let step = scheduler.step()?.ok_or("work")?;
    assert_eq!((step.requests, step.tokens), (vec![(id, 0..9)], 9));
    let ends: Vec<&[u32]> = scheduler.histories(id)?.iter().map(|tokens| &tokens[17..]).collect();
    let want: [&[u32]; 9] = [&[2], &[2, 4], &[2, 4, 5], &[2], &[2, 4], &[2, 4, 6], &[2], &[2, 3], &[2, 3, 7]];
    assert_eq!(ends, want);
    for chosen in [&[4; 8][..], &[4; 10]] {
        assert!(matches!(scheduler.accept(id, chosen), Err(BatchError::Drafts { drafted: 8, .. })));
    }
    assert!(scheduler.accept(id, &[4, 6, 8, 4, 6, NO_TOKEN, 4, 9, 9]).is_err());
    // The second path is the longest that was chosen.
    assert_eq!(scheduler.accept(id, &[4, 6, 8, 4, 6, 10, 4, 9, 9])?, 3);
    assert_eq!(scheduler.tokens(id)?[17..], [2, 4, 6, 10]);
    assert_eq!(scheduler.batch().stats().sequences, 1);
    assert_eq!(scheduler.step()?.ok_or("work")?.requests, [(id, 0..1)]);
    // Another tree in its place, a token, a fork and the end: each gives up the paths.
    scheduler.push(id, 11)?;
    for _ in 0..2 {
        assert_eq!(scheduler.draft_tree(id, &nodes)?, 5);
        assert_eq!(scheduler.batch().stats().sequences, 3);
    }
    let fork = scheduler.fork(id)?;
    assert_eq!((scheduler.batch().stats().sequences, scheduler.tokens(fork)?.len()), (2, 22));
    assert_eq!(scheduler.draft_tree(id, &nodes)?, 5);
    scheduler.push(id, 12)?;
    assert_eq!(scheduler.batch().stats().sequences, 2);
    assert_eq!(scheduler.draft_tree(fork, &nodes)?, 5);
    [id, fork].into_iter().try_for_each(|id| scheduler.finish(id))?;
    let stats = scheduler.batch().stats();
    assert_eq!((stats.sequences, stats.free_pages), (0, WIDE.pages));
    Ok(())
}

/// Requests that wait get the sequences of other paths, and one that is pre-empted behind its step keeps what was
/// chosen.
#[test]
fn paths_make_room() -> Outcome {
    let model = model("qwen3")?;
    let node = |token, parent| DraftNode { token, parent };
    let nodes = [node(3, None), node(4, None), node(5, Some(1)), node(6, None)];
    let mut scheduler = Scheduler::new(model.batch(BatchOptions { max_sequences: 2, ..WIDE })?);
    let id = scheduler.submit(&[1, 2])?;
    scheduler.step()?;
    scheduler.push(id, 2)?;
    // The first two paths, of one draft and of two.
    assert_eq!(scheduler.draft_tree(id, &nodes)?, 3);
    let late = scheduler.submit(&[7, 8])?;
    let step = scheduler.step()?.ok_or("work")?;
    assert_eq!(step.requests.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [id, late]);

    let options = BatchOptions { pages: 3, capacity: 48, ..WIDE };
    let mut scheduler = Scheduler::new(model.batch(options)?);
    let (old, young) = (scheduler.submit(&[1; 15])?, scheduler.submit(&[2; 3])?);
    scheduler.step()?;
    scheduler.push(old, 4)?;
    scheduler.push(young, 5)?;
    assert_eq!(scheduler.draft_tree(young, &[node(6, None), node(7, None)])?, 2);
    assert_eq!(scheduler.step()?.ok_or("work")?.requests, [(old, 0..1), (young, 1..5)]);
    // Pages of both paths and of the older one are all that there are.
    scheduler.accept(old, &[8])?;
    scheduler.step()?;
    let stats = scheduler.batch().stats();
    assert_eq!((stats.preemptions, stats.sequences), (1, 2));
    assert_eq!(scheduler.accept(young, &[7, 9, 7, 10])?, 2);
    assert_eq!(scheduler.tokens(young)?, [2, 2, 2, 5, 7, 10]);
    Ok(())
}

#[test]
fn trees_that_are_refused() -> Outcome {
    let mut scheduler = Scheduler::new(model("qwen3")?.batch(WIDE)?);
    let id = scheduler.submit(&[1; 60])?;
    scheduler.step()?;
    scheduler.push(id, 3)?;
    let node = |token, parent| DraftNode { token, parent };
    for parent in [0, 5] {
        let error = scheduler.draft_tree(id, &[node(1, Some(parent))]).unwrap_err().to_string();
        assert_eq!(error, format!("Scheduler: parent: expected an earlier draft than 0, got {parent}"));
    }
    assert!(scheduler.draft_tree(id, &[node(1 << 30, None)]).is_err());
    // Beside the one that follows there is room for two.
    let chain: Vec<DraftNode> = (0..9).map(|i: u32| node(i, i.checked_sub(1).map(|i| i as usize))).collect();
    assert_eq!(scheduler.draft_tree(id, &chain)?, 2);
    assert_eq!(scheduler.draft_tree(id, &[])?, 0);
    let mut scheduler = Scheduler::new(model("qwen3_next")?.batch(OPTIONS)?);
    let id = scheduler.submit(&[1, 2, 3])?;
    scheduler.step()?;
    scheduler.push(id, 4)?;
    let error = scheduler.draft_tree(id, &[node(5, None)]).unwrap_err();
    assert!(matches!(error, BatchError::RecurrentTree { .. }));
    assert_eq!(
        error.to_string(),
        "a tree of drafts for request 1: expected a model without recurrent states, which cannot go back"
    );
    Ok(())
}
