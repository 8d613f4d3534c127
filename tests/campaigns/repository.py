"""git: a repository made on the mount, cloned, repacked and checked."""

from __future__ import annotations

import os

from support.processes import shell

from campaigns.harness import Place, need

SCRIPT = """
git init -q repo && cd repo && git config user.name Nobody && git config user.email nobody@example.org
for c in $(seq {commits}); do
  for n in $(seq {files}); do mkdir -p d$((n % 9)); seq $((n * c)) $((n * c + 300)) >d$((n % 9))/f$n; done
  git add . && git commit -qm "commit $c"
done
git checkout -q -b side HEAD~{half} && git mv d1 moved && git commit -qm "a directory moves"
git merge -q -m "merge" master 2>/dev/null || git merge -q -m "merge" main
git gc -q --aggressive && git fsck --full --strict
cd .. && git clone -q --no-hardlinks repo clone && git clone -q -l repo linked
for r in clone linked; do git -C $r fsck --full --strict && test -z "$(git -C $r status --porcelain)"; done
git -C clone worktree add -q ../tree HEAD~{half} && git -C clone stash list
git -C clone log --oneline --first-parent | wc -l
git -C clone gc -q && git -C clone fsck --full && diff -r --exclude=.git repo clone
git -C clone rev-list --count HEAD
"""


def git(place: Place) -> str:
    need("git")
    commits, files = (6, 40) if place.quick else (60, 200)
    environment = dict(os.environ, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null", HOME=str(place.host))
    environment["GIT_CONFIG_COUNT"] = "1"
    environment |= {"GIT_CONFIG_KEY_0": "init.defaultBranch", "GIT_CONFIG_VALUE_0": "main"}
    script = SCRIPT.format(commits=commits, files=files, half=commits // 2)
    done = shell(script, cwd=place.root, env=environment, timeout=3600)
    found = int(done.stdout.split()[-1])
    if found != commits + 2:
        raise AssertionError(f"{found} commits, expected {commits + 2}\n{done.stdout}\n{done.stderr}")
    return f"{commits} commits of {files} files; merge, gc, fsck, two clones, a worktree"
