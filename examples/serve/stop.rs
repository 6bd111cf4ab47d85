//! Stop strings: a text up to the first of them, as it comes.

/// Holds back what may be the beginning of a stop string.
#[derive(Debug)]
pub struct StopText {
    stops: Vec<String>,
    held: String,
}

impl StopText {
    /// None of them empty.
    pub fn new(stops: Vec<String>) -> Self {
        StopText { stops, held: String::new() }
    }

    /// What there is to write after this piece, and whether a stop string ends it. It is not written itself.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        let place = |stop: &String| self.held.find(stop.as_str()).map(|place| (place + stop.len(), place));
        // The one that is complete first, however the text comes.
        if let Some((_, place)) = self.stops.iter().filter_map(place).min() {
            self.held.truncate(place);
            return (std::mem::take(&mut self.held), true);
        }
        let is_beginning =
            |&place: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[place..]));
        let keep = self.held.char_indices().map(|(place, _)| place).find(is_beginning);
        let kept = self.held.split_off(keep.unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, kept), false)
    }

    /// What is left at the end.
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However the text is cut: all up to where the first stop string begins, and nothing too early.
    #[test]
    fn texts_end_at_the_first() {
        for (text, stops, want) in [
            ("abcabd", &["abd"][..], "abc"),
            ("aaab", &["aab"], "a"),
            ("abc", &["d", "abcd"], "abc"),
            ("héllo é!", &["é!"], "héllo "),
            ("xyz", &["yz", "xyz"], ""),
            ("xyz", &["z", "y"], "x"),
            ("abcd", &["abcd", "bc"], "a"),
            ("", &["a"], ""),
            ("abc", &[], "abc"),
        ] {
            let places: Vec<usize> = text.char_indices().map(|(place, _)| place).collect();
            for cuts in 0..1u32 << places.len() {
                let mut own = StopText::new(stops.iter().map(|&stop| stop.to_owned()).collect());
                let (mut written, mut is_stopped, mut start) = (String::new(), false, 0);
                let ends = places.iter().enumerate().filter(|(i, _)| cuts >> i & 1 == 1).map(|(_, &p)| p);
                for end in ends.chain([text.len()]) {
                    let (piece, stopped) = own.push(&text[start..end]);
                    written += &piece;
                    assert!(want.starts_with(&written), "{text:?} {stops:?} {cuts:b}");
                    start = end;
                    if stopped {
                        is_stopped = true;
                        break;
                    }
                }
                if !is_stopped {
                    written += &own.finish();
                }
                assert_eq!(written, want, "{text:?} {stops:?} {cuts:b}");
                assert_eq!(is_stopped, want != text, "{text:?} {stops:?}");
            }
        }
    }
}
